"""Every notebook runs from the first cell to the last; the outputs that are kept are those of a whole run."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """Of every cell, which kinds of output it has (text comes in any number of pieces)."""
    return [list(dict.fromkeys(out.output_type for out in cell.get("outputs", []))) for cell in notebook.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    kept = kinds(notebook)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises where a cell does
    assert kinds(notebook) == kept, "the notebook keeps outputs of another run: make notebooks"


def test_the_notebooks_are_listed_in_the_readme() -> None:
    assert len(NOTEBOOKS) == 7
    readme = (ROOT / "README.md").read_text()
    assert all(f"notebooks/{path.name}" in readme for path in NOTEBOOKS)
