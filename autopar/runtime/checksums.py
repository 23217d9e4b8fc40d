"""Whether a checkpoint is whole: run.json holds the SHA-256 of every other file of its folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

RUN = "run.json"


def checksums(files: Iterable[Path], folder: Path) -> dict[str, str]:
    """SHA-256 in hexadecimal of each file, by its path inside the folder."""
    return {path.relative_to(folder).as_posix(): _digest(path) for path in files}


def files_of(folder: Path) -> list[Path]:
    """Every file that has a checksum, sorted; run.json itself has none."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / RUN)


def damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None if each file is as it was written.

    Args:
        share, shares: reads only every ``shares``-th file, beginning with this one.
    """
    try:
        files = json.loads((folder / RUN).read_text())["files"]
    except FileNotFoundError:
        return f"{RUN} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{RUN} holds no checksums"
    for name in sorted(files)[share::shares]:
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != files[name]:
            return f"the checksum of {name} differs"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
