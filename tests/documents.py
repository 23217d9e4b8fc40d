"""Runs what a Markdown page shows, in a folder of a newcomer's own.

In a plain block every line that begins with ``autopar`` runs and must succeed. A ``console`` block shows a command
behind ``$ `` that fails, and below it just what it prints. A ``python`` or ``toml`` block whose first line is
``# file NAME`` is written under that name; another Python block that imports autopar runs as a program. ``yaml`` and
``json`` must parse.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"# file (\S+)\n")
OWN_PROCESS = ("run", "profile", "demo")  # they start processes, which would import pytest's main module
ENV = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    stdout: str
    stderr: str


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block, in order."""
    return [(language, text) for language, text in BLOCK.findall(page.read_text())]


def commands(text: str) -> list[str]:
    """The autopar commands of a plain block, and torchrun on this machine; a line that ends in a backslash goes on."""
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(("autopar ", "torchrun --nproc-per-node"))]


def replay(page: Path, folder: Path) -> dict[str, str]:
    """Does all that a page shows; gives what every command and program printed on standard output."""
    printed: dict[str, str] = {}
    for language, text in blocks(page):
        named = NAMED.match(text)
        if named:
            (folder / named[1]).write_text(text)
        elif language == "":
            for line in commands(text):
                done = call(shlex.split(line), folder)
                assert done.code == 0, f"{page.name}: {line}: {done.stderr}"
                printed[line] = done.stdout
        elif language == "console":
            _refuse(page, text, folder)
        elif language == "python" and "import autopar" in text:
            printed[text] = program(text, folder)
        elif language == "json":
            json.loads(text)
        elif language == "yaml":
            import yaml

            assert list(yaml.safe_load_all(text)), page.name
    return printed


def _refuse(page: Path, text: str, folder: Path) -> None:
    """Commands that fail, with what they print."""
    parts = re.findall(r"^\$ (autopar .*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
    for line, shown in parts:
        done = call(shlex.split(line), folder)
        assert done.code in (2, 3), f"{page.name}: {line} ends with {done.code}: {done.stderr}"
        printed = done.stderr.replace(f"{folder.resolve()}/", "")
        assert shown.split() == printed.split(), f"{page.name}: {line} prints {printed}"


def call(words: list[str], folder: Path) -> Done:
    """Runs a command, in this process where it starts none itself (torch is slow to import)."""
    name, *rest = words
    if name == "torchrun":
        return _start(["torch.distributed.run", "--standalone", *rest], folder)
    if rest[0] in OWN_PROCESS:
        return _start(["autopar.cli", *rest, *(["--budget", "2"] if rest[0] == "profile" else [])], folder)
    from autopar.cli.main import main

    code, out, err = 0, io.StringIO(), io.StringIO()
    with _inside(folder, words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _inside(folder: Path, words: list[str]) -> Iterator[None]:
    with contextlib.chdir(folder), mock.patch.dict(os.environ, ENV), mock.patch.object(sys, "argv", words):
        yield


def _start(module: list[str], folder: Path) -> Done:
    """Runs a Python module with arguments in a process of its own."""
    words, env = [sys.executable, "-m", *module], {**os.environ, **ENV}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=200)
    return Done(done.returncode, done.stdout, done.stderr)


def program(text: str, folder: Path) -> str:
    """Runs a Python program, under torchrun where it trains in parallel; gives its standard output."""
    (folder / "program.py").write_text(text)
    together = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    parallel = "init_process_group" in text or "autopar.parallelize(" in text
    done = _start(together if parallel else ["program"], folder)
    assert done.code == 0, done.stderr
    return done.stdout


def links(page: Path) -> list[str]:
    """Files and web addresses that a page links to, anchors apart."""
    return re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
