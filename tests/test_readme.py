"""The README's commands and examples, run as they stand, in a folder of a newcomer's own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python" and "import autopar" in text]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def commands() -> list[str]:
    """Every line of a plain block that is an autopar command."""
    lines = [line for language, text in BLOCKS if not language for line in text.splitlines()]
    return [line for line in lines if line.startswith("autopar ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("newcomer")


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=ENV, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def test_every_command_runs_in_the_order_of_the_readme(folder: Path) -> None:
    assert len(commands()) >= 7
    for line in commands():
        words = shlex.split(line)[1:]
        if words[0] == "profile":
            words += ["--budget", "3"]
        run([sys.executable, "-m", "autopar.cli", *words], folder)
    for name in ("model.py", "plan.json", "metrics.jsonl", "profile.json"):
        assert (folder / name).is_file()


def test_python_examples_run(folder: Path) -> None:
    plan, loop = PYTHON
    (folder / "plan.py").write_text(plan)
    (folder / "loop.py").write_text(loop)
    assert float(run([sys.executable, "plan.py"], folder).splitlines()[-1]) > 0
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    losses = [float(line.split()[1]) for line in run([*launcher, "loop.py"], folder).splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target
