"""Files that a reader never sees half of."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import AutoparError, InputError


@contextmanager
def replacing(path: Path, error: type[AutoparError]) -> Iterator[Path]:
    """A temporary file in the same folder, renamed to ``path`` at the end; deleted if the body fails.

    Args:
        error: what to raise.

    Raises:
        AutoparError: the folder does not exist or cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            yield Path(name)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as fault:
        raise error(f"cannot write {str(path)!r}: {fault.strerror or fault}", "Name a writable folder") from None


def check_output(path: Path, what: str, folder: bool = False) -> None:
    """Before the work rather than after it: a file, or a folder, that will be written.

    Args:
        what: the option that names it, for the message.
        folder: it is a folder, which may not exist yet.

    Raises:
        InputError: something else has that name, or the folder of the file does not exist.
    """
    if folder and path.exists() and not path.is_dir():
        raise InputError(f"{what} {str(path)!r} is a file", "Name a folder")
    if not folder and path.is_dir():
        raise InputError(f"{what} {str(path)!r} is a folder", "Name a file")
    if not folder and not path.absolute().parent.is_dir():
        raise InputError(f"{what} {str(path)!r} is in a folder that does not exist", "Make it, or write elsewhere")


def check_ending(path: Path, *endings: str) -> None:
    """Before the work rather than after it: the name of a file to write.

    Args:
        endings: those that will do, as ``.png``.

    Raises:
        InputError: the file's ending is another, or its folder does not exist.
    """
    if path.suffix.lower() not in endings:
        raise InputError(f"file {str(path)!r} ends in {path.suffix!r}", f"Name a {' or a '.join(endings)} file")
    if not path.absolute().parent.is_dir():
        raise InputError(f"output folder {str(path.absolute().parent)!r} does not exist", "Make it, or write elsewhere")
