"""What holds for every command: an example that runs, one JSON document, lines that fit, colours only where wanted."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from autopar.cli.main import app
from tests.documents import ENV, OWN_PROCESS, ROOT, call

COMMANDS: dict[str, str] = {
    command.callback.__name__: command.callback.__doc__ or "" for command in app.registered_commands if command.callback
}
# run elsewhere: what starts processes, needs a checkpoint, or takes all published runs
ELSEWHERE = {*OWN_PROCESS, "weights", "validate"}
ARGUMENTS = {
    "search": "model.py --cluster local-cpu-2 --global-batch 16 --pin dp=2",
    "graph": "model.py",
    "estimate": "model.py --cluster local-cpu-2 --plan plan.json",
    "explain": "plan.json",
    "compare": "plan.json other.json",
    "plot": "plan.json --kind breakdown -o plot.svg",
    "report": "plan.json -o page.html",
    "export": "plan.json --to deepspeed",
    "init": "written.py",
    "devices": "",
    "clusters": "",
}
each = pytest.mark.parametrize("name", sorted(ARGUMENTS))
TABLES = ("search", "graph", "estimate", "explain", "compare", "devices", "clusters")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name."""
    made = tmp_path_factory.mktemp("shell")
    (made / "model.py").write_text((ROOT / "autopar/zoo/mlp.py").read_text())
    for name, pin in (("plan.json", "dp=2"), ("other.json", "tp=2")):
        place = ["--cluster", "local-cpu-2", "--global-batch", "16", "--pin", pin, "-o", name]
        assert call(["autopar", "search", "model.py", *place], made).code == 0
    return made


def test_every_command_is_in_the_table() -> None:
    assert set(COMMANDS) == set(ARGUMENTS) | ELSEWHERE


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_has_an_example(name: str) -> None:
    assert f"Example: autopar {name}" in COMMANDS[name]


def test_examples_of_the_help_run(folder: Path) -> None:
    (folder / "model.py").rename(folder / "aside.py")
    for name in ("init", *sorted(set(ARGUMENTS) - {"init", "estimate", "search"})):
        for line in re.findall(r"Example: (autopar .*)", COMMANDS[name]):
            done = call(shlex.split(line), folder)
            assert done.code == 0, f"{line}: {done.stderr}"
        if name == "init":
            (folder / "aside.py").rename(folder / "model.py")


@each
def test_json_is_one_document_and_nothing_else(name: str, folder: Path) -> None:
    done = call(["autopar", name, *ARGUMENTS[name].split(), "--json"], folder)
    assert done.code == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize("width", [60, 100])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_the_width(name: str, width: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENV, "COLUMNS", str(width))
    done = call(["autopar", name, *ARGUMENTS[name].split()], folder)
    assert done.code == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= width
    assert "\x1b" not in done.stdout


def on_a_terminal(words: list[str], **environment: str) -> str:
    """What a command writes to a terminal."""
    env = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    env.update({"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment})
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-m", "autopar.cli", *words], env=env, stdout=theirs, stderr=theirs) as done:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
        assert done.wait(timeout=60) == 0
    os.close(ours)
    return b"".join(parts).decode()


COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|9[0-7])(?:;\d+)*m")


def test_colours_only_on_a_terminal_that_wants_them() -> None:
    assert COLOUR.search(on_a_terminal(["search", "--help"]))
    assert not COLOUR.search(on_a_terminal(["search", "--help"], NO_COLOR="1"))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("search --cluster dgx-h1", ["dgx-h100-1024", "dgx-h100-64", "dgx-h100-8"]),
        ("export --to mega", ["megatron"]),
        ("init --template gp", ["gpt", "gpt_tied"]),
        ("exp", ["explain", "export"]),
    ],
)
def test_tab_completes(typed: str, offered: list[str], tmp_path: Path) -> None:
    program = "import sys; sys.argv = ['autopar']; from autopar.cli.main import main; main()"
    words = f"autopar {typed}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == offered


def test_completion_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from autopar.cli import completion, main; completion.clusters(''); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=60)


def test_version_of_typer_offers_installation() -> None:
    options = {parameter.name for parameter in typer.main.get_command(app).params}
    assert "install_completion" in options
