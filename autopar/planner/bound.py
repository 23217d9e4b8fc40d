"""A proven lower bound of the step time under the memory limit.

Stage ``i`` waits for the stages before it on the way in and out and works on every micro-batch, then steps its
optimizer: ``step >= sum_{j<i} t_j + m t_i + tail_i`` for every i. Each time is bounded by Lagrangian relaxation of
the stage's memory limit (Everett 1963): ``t >= min (time + p x bytes) - p x limit`` for any price ``p >= 0``, where the
minimum over layouts and recomputation runs block by block (:mod:`autopar.planner.chain_tables`). Over the cuts into
stages, the least possible maximum is found by bisection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.planner.chain_tables import ChainTables, Shared
from autopar.planner.elimination import Array
from autopar.planner.prices import Weights

PRICES = (0.0, *(0.004 * 1.7**i for i in range(16)))  # of memory, in the model's time over a device's memory
MOST_ENTRIES = 4_000_000
PRECISION = 1e-4  # of the bisection


@dataclass(frozen=True)
class StageTerms:
    """What a mesh adds to the tables.

    Attributes:
        stages, micro_batches: of the pipeline.
        element_s: seconds per local parameter element and micro-batch.
        once_s: likewise once a step.
        reduction_s: per axis and element, once a step.
        element_bytes: memory per local parameter element.
        limit_bytes: what tensors of a device may take.
        modes: allowed recomputation, False for none and True for full.
    """

    stages: int
    micro_batches: int
    element_s: float
    once_s: float
    reduction_s: dict[str, float]
    element_bytes: float
    limit_bytes: float
    modes: tuple[bool, ...] = (False, True)

    def in_flight(self) -> list[int]:
        """Fewest micro-batches that each stage holds at its peak, under any schedule."""
        return [min(self.micro_batches, self.stages - stage) for stage in range(self.stages)]


def weights_of(terms: StageTerms, price: float, in_flight: int, recompute: bool, critical: bool) -> Weights:
    """Weights of one stage.

    Args:
        price: seconds per byte of its memory.
        critical: with what happens once a step, shared out over micro-batches.
    """
    count = terms.micro_batches
    plain = Weights(
        forward=2.0 if recompute else 1.0,
        element_s=terms.element_s + price * terms.element_bytes + (terms.once_s / count if critical else 0.0),
        reduction_s={a: s / count for a, s in terms.reduction_s.items()} if critical else {},
        made_s=0.0,
    )
    held = price * in_flight
    return replace(plain, entering_s=held) if recompute else replace(plain, kept_s=held)


def lower_bound(tables: ChainTables, terms: StageTerms) -> float:
    """Seconds of a step that no plan of one mesh and micro-batch size that fits can beat; infinite where none fits."""
    return min(_bound(tables, terms, shared) for shared in tables.boundaries.shared)


def _bound(tables: ChainTables, terms: StageTerms, shared: Shared) -> float:
    flights = sorted(set(terms.in_flight()))
    unit = _free_seconds(tables, terms, shared) / terms.limit_bytes
    prices = [unit * price for price in PRICES]
    room = terms.limit_bytes - _workspaces(tables)
    before, critical = (
        _relaxed(tables, terms, shared, prices, flights, room, is_critical) for is_critical in (False, True)
    )
    index = [flights.index(k) for k in terms.in_flight()]
    return least_maximum(before[index], critical[index], terms.micro_batches)


def _free_seconds(tables: ChainTables, terms: StageTerms, shared: Shared) -> float:
    """Of one micro-batch through all blocks, memory for free."""
    times = spans(tables, [weights_of(terms, 0.0, 1, False, True)], 1, shared)
    return float(times[0, 0, -1])


def _relaxed(
    tables: ChainTables,
    terms: StageTerms,
    shared: Shared,
    prices: Sequence[float],
    flights: Sequence[int],
    room: Array,
    critical: bool,
) -> Array:
    """Seconds of blocks a..b-1 as one stage, ``[in flight, a, b]``: the best of the prices."""
    found = np.full((len(flights), *room.shape), -np.inf)
    for i, held in enumerate(flights):
        weights = [weights_of(terms, p, held, mode, critical) for mode in terms.modes for p in prices]
        times = spans(tables, weights, len(terms.modes), shared)
        paid = np.array(prices)[:, None, None] * room
        found[i] = np.max(times - paid, axis=0)
    return found


def spans(tables: ChainTables, weights: Sequence[Weights], modes: int, shared: Shared) -> Array:
    """Least seconds of blocks a..b-1, ``[weights / modes, a, b]``; infinite where b <= a.

    Args:
        weights: those of the first mode, then those of the next; each block takes the mode that it likes best.
    """
    count, cases = len(tables.blocks), len(weights) // modes
    least = tables.least(weights)
    matrices: dict[object, Array] = {}
    found = np.full((cases, count, count + 1), np.inf)
    now: Array | None = None  # [a, case, state]
    for index in range(count):
        slot = tables.slots[index]
        if slot not in matrices:
            every = tables.matrix(index, least[slot], shared)
            matrices[slot] = every.reshape(modes, cases, *every.shape[1:]).min(axis=0)
        matrix = matrices[slot]
        fresh = np.zeros((1, cases, matrix.shape[1]))
        now = fresh if now is None else np.concatenate([now, fresh])
        now = _through(now, matrix)
        found[:, : index + 1, index + 1] = now.min(axis=2).T
    return found


def _through(now: Array, matrix: Array) -> Array:
    """Min-plus product ``[a, case, before] x [case, before, after]``, in portions."""
    portion = max(1, MOST_ENTRIES // matrix.size)
    parts = [(now[i : i + portion, :, :, None] + matrix).min(axis=2) for i in range(0, len(now), portion)]
    return np.concatenate(parts)


def _workspaces(tables: ChainTables) -> Array:
    """Bytes that the largest operator of blocks a..b-1 needs at least, ``[a, b]``."""
    each = [tables.workspace(index) for index in range(len(tables.blocks))]
    found = np.zeros((len(each), len(each) + 1))
    for a in range(len(each)):
        found[a, a + 1 :] = np.maximum.accumulate(each[a:])
    return found


def least_maximum(before: Array, critical: Array, micro_batches: int) -> float:
    """The least, over cuts, of ``max_i (sum_{j<i} before_j + m critical_i)``, from below.

    Args:
        before: ``[stage, a, b]``: blocks a..b-1 as that stage, ahead of the critical one.
        critical: likewise as the critical stage.
    """
    whole = micro_batches * critical
    low, high = 0.0, float(np.max(whole[np.isfinite(whole)], initial=0.0)) * len(before) + 1.0
    if not _reaches(high, before, whole):
        return float("inf")
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _reaches(middle, before, whole) else (middle, high)
    return low


def _reaches(most: float, before: Array, whole: Array) -> bool:
    """Whether some cut keeps every stage within ``most``: the least time ahead of a stage is best for all later."""
    count = before.shape[1]
    ahead = np.full(count, np.inf)
    ahead[0] = 0.0
    for stage, (mine, critical) in enumerate(zip(before, whole, strict=True)):
        allowed = ahead[:, None] + critical <= most
        if stage == len(before) - 1:
            return bool(allowed[:, -1].any())
        after = np.where(allowed, ahead[:, None] + mine, np.inf).min(axis=0)
        ahead = after[:count]
    return False


def fill(pp: int, micro_batches: int) -> float:
    """Least step time of a pipeline over the time of one micro-batch through all of it.

    Stage s waits for the stages before it on the way in and out and works on every micro-batch:
    ``step >= sum_{i<s} t_i + m t_s``. The stage times that level these give ``1 / (1 - (1 - 1/m)^pp)``.
    """
    return float(1.0 / (1.0 - (1.0 - 1.0 / micro_batches) ** pp))
