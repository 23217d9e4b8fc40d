"""Keeps standard error to what the user needs while torch traces a model."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

TRACERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def without_dumps() -> Iterator[None]:
    """While it holds, torch does not print the graph so far when it gives up: the exception says where and why.

    What the user's own code writes to standard error appears at the end, unless tracing fails.
    """
    held = io.StringIO()
    loggers = [logging.getLogger(name) for name in TRACERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(held):
            yield
        sys.stderr.write(held.getvalue())
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
