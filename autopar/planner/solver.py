"""The integer programming solver: HiGHS, else CBC."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import pulp

from autopar.errors import AutoparError


def solver() -> Any:
    """Single-threaded and to proven optimality, so that equal inputs give equal plans.

    Raises:
        AutoparError: no solver is installed.
    """
    highs = pulp.HiGHS(msg=False, threads=1, gapRel=0.0)
    if highs.available():
        _drop_banner()
        return highs
    cbc = pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=0.0)
    if cbc.available():
        return cbc
    raise AutoparError("no integer programming solver is installed", "Install one: pip install highspy")


@lru_cache(maxsize=1)
def _drop_banner() -> None:
    """HiGHS greets once per process on standard output, before it can be told not to; ``--json`` must stay clean."""
    import highspy

    with _standard_output_closed():
        highspy.Highs()  # type: ignore[no-untyped-call]


@contextmanager
def _standard_output_closed() -> Iterator[None]:
    with suppress(OSError):
        kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            os.close(nowhere)
        return
    yield
