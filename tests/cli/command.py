"""Runs the command line as a user would, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GPT = str(ROOT / "autopar/zoo/gpt.py")


def autopar(*words: str, cwd: Path | None = None, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs ``autopar WORDS``; stdout and stderr are kept apart."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "autopar.cli", *words], cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True
    )


def succeed(*words: str, cwd: Path | None = None, timeout: float = 240) -> Any:
    """Runs a ``--json`` command that must succeed; returns its one JSON document."""
    done = autopar(*words, "--json", cwd=cwd, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refuse(*words: str, code: int = 2, cwd: Path | None = None) -> str:
    """Runs a command that must fail with one clear message; returns it."""
    done = autopar(*words, cwd=cwd)
    assert done.returncode == code, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]
