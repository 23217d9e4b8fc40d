"""Keeps standard error to what the user needs while torch traces a model."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

TRACER = "torch.fx.experimental.symbolic_shapes"


@contextmanager
def without_dumps() -> Iterator[None]:
    """While it holds, torch does not print the graph so far when it gives up: the exception says where and why.

    What the user's own code writes to standard error appears at the end, unless tracing fails.
    """
    logger, held = logging.getLogger(TRACER), io.StringIO()
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stderr(held):
            yield
        sys.stderr.write(held.getvalue())
    finally:
        logger.setLevel(before)
