"""Files that a reader never sees half of."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import AutoparError


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
