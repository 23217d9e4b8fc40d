"""Least seconds of every run of blocks in a row, with the best placements at the boundaries between them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.planner.chain_tables import ChainTables, Shared
from autopar.planner.elimination import Array, Minimum


def spans(
    tables: ChainTables,
    least: Sequence[Minimum],
    modes: int,
    allowed: Sequence[Sequence[int]],
    shared: Shared,
    leaving: Sequence[Array] = (),
) -> Array:
    """Least seconds of blocks a..b-1, ``[case, a, b]``; infinite where b <= a.

    Runs that begin inside a row of blocks alike are as long as the one before them was a block ago.

    Args:
        least: of every kind of block, all cases of the first mode, then all of the next, ``modes`` in all.
        allowed: the modes of every kind of block; each block takes the one that it likes best.
        leaving: of every block, seconds of sending its outputs on, in each state.
    """
    count = len(tables.blocks)
    cases = len(least[0].table) // modes
    matrices: dict[int, Array] = {}
    found = np.full((count, count + 1, cases), np.inf)
    now, ended = np.zeros((0, cases, 1)), np.zeros((0, cases))  # [a, case, state after], [a, case]
    alike, before = -1, 0  # the kind of the block before, and where its row begins
    for index, kind in enumerate(tables.slots):
        if kind not in matrices:
            every = tables.matrix(index, least[kind], shared)
            matrices[kind] = every.reshape(modes, cases, *every.shape[1:])[list(allowed[kind])].min(axis=0)
        matrix = matrices[kind]
        if kind != alike:
            alike, before = kind, index
            now = np.concatenate([now.reshape(index, cases, matrix.shape[1]), np.zeros((1, cases, matrix.shape[1]))])
            now, ended = _through(now, matrix), ended[:0]
        else:
            moved, shorter = _through(now[: before + 1], matrix), now[before:]
            now, ended = np.concatenate([moved, shorter]), ended[before:]
        new = now[: len(now) - len(ended)]
        ended = np.concatenate([_least(new + leaving[index] if leaving else new), ended])
        found[: index + 1, index + 1] = ended
    return np.moveaxis(found, 2, 0)


def _through(now: Array, matrix: Array) -> Array:
    """Min-plus product ``[a, case, before] x [case, before, after]``, state by state: there are few."""
    found = now[:, :, 0, None] + matrix[:, 0]
    for state in range(1, matrix.shape[1]):
        np.minimum(found, now[:, :, state, None] + matrix[:, state], out=found)
    return found


def _least(now: Array) -> Array:
    """The minimum over the last axis."""
    found = now[..., 0].copy()
    for state in range(1, now.shape[-1]):
        np.minimum(found, now[..., state], out=found)
    return found
