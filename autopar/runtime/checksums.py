"""Whether a checkpoint is whole: run.json holds the SHA-256 of every other file of its folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

RUN = "run.json"


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 in hexadecimal of each file, by its path inside the folder; run.json itself is left out."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / RUN)
    return {p.relative_to(folder).as_posix(): _digest(p) for p in files}


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if each file is as it was written."""
    try:
        files = json.loads((folder / RUN).read_text())["files"]
    except FileNotFoundError:
        return f"{RUN} is missing"
    except (ValueError, KeyError, TypeError):
        return f"{RUN} holds no checksums"
    for name, digest in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if _digest(path) != digest:
            return f"the checksum of {name} differs"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
