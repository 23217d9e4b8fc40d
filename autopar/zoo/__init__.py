"""Small ready models; each file is a model.py, and ``autopar init`` copies one to start from."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import InputError
from autopar.plan import write_text

FOLDER = Path(__file__).parent


def templates() -> tuple[str, ...]:
    """Names of the models of the zoo."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("_")))


def write_template(name: str, path: Path, *, force: bool = False) -> None:
    """Copies a model of the zoo to a file.

    Raises:
        InputError: there is no such model, or the file exists and ``force`` is not given.
    """
    if name not in templates():
        raise InputError(f"there is no template {name!r}", f"Choose one of {', '.join(templates())}")
    if path.exists() and not force:
        raise InputError(f"{str(path)!r} exists", "Choose another name, or overwrite it with --force")
    write_text(path, (FOLDER / f"{name}.py").read_text())
