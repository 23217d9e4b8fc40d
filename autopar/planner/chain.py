"""Placements along the whole chain: dynamic programming over the placements at the boundaries between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.plan import Layout
from autopar.planner.chain_tables import ChainTables, Shared, State
from autopar.planner.elimination import Array, Minimum
from autopar.planner.prices import Weights


@dataclass(frozen=True)
class Chain:
    """Layouts of every block, in order.

    Attributes:
        states: placements of each block's outputs.
        seconds: per micro-batch, of all blocks together, as weighed.
    """

    layouts: tuple[Layout, ...]
    states: tuple[State, ...]
    seconds: float


def best_chain(tables: ChainTables, weights: Weights) -> Chain:
    """The cheapest layouts of all blocks together."""
    least = tables.least([weights])
    found = [_shortest(tables, least, shared) for shared in tables.boundaries.shared]
    return min(found, key=lambda chain: chain.seconds)  # the first of equal ones


def _shortest(tables: ChainTables, least: Sequence[Minimum], shared: Shared) -> Chain:
    matrices: dict[int, Array] = {}
    reached, came = np.zeros(1), []
    for index, slot in enumerate(tables.slots):
        if slot not in matrices:
            matrices[slot] = tables.matrix(index, least[slot], shared)[0]
        total = reached[:, None] + matrices[slot]
        came.append(total.argmin(axis=0))
        reached = total.min(axis=0)
    after = int(reached.argmin())
    seconds = float(reached[after])
    layouts, states = [], []
    known: dict[tuple[int, int, int], Layout] = {}
    for index in reversed(range(len(tables.slots))):
        before, slot = int(came[index][after]), tables.slots[index]
        if (slot, before, after) not in known:
            known[slot, before, after] = tables.layout(index, least[slot], 0, before, after, shared)[0]
        layouts.append(known[slot, before, after])
        states.append(tables.boundaries.states[index][after])
        after = before
    return Chain(tuple(reversed(layouts)), tuple(reversed(states)), seconds)
