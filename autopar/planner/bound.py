"""A proven lower bound of the step time under the memory limit.

Stage ``i`` starts its first backward when one micro-batch has gone to the end and come back; by then it has run at
most ``k_i`` forwards. It still has ``m`` backwards and ``m - k_i`` forwards to do, after the last of which the gradient
goes on to the first stage; then the optimizer steps. So for every stage ``i``, under 1F1B and GPipe alike,
``step >= sum_{j!=i} t_j + m t_i - (k_i - 1) f_i + tail_i``.

Each time is bounded by Lagrangian relaxation of the stage's memory limit (Everett 1963):
``t >= min (time + p x bytes) - p x limit`` for any price ``p >= 0``, where the minimum over layouts and recomputation
runs block by block (:mod:`autopar.planner.chain_tables`). Over the cuts into stages, the least total is found by
bisection on what the critical stage adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.chain_tables import ChainTables, Shared, Slot
from autopar.planner.elimination import Array, Minimum
from autopar.planner.prices import Weights

PRICES = (0.0, *(0.004 * 2.0**i for i in range(12)))  # of memory, in the model's time over a device's memory
MOST_ENTRIES = 4_000_000
MOST_POSITIONS = 8  # stages that are told apart
PRECISION, STEP = 1e-4, 1e-3  # of the bisection, and between limits on what the critical stage adds


@dataclass(frozen=True)
class StageTerms:
    """What a mesh adds to the tables.

    Attributes:
        micro_batches: per step.
        element_s: seconds per local parameter element and micro-batch.
        once_s: likewise once a step.
        reduction_s: per axis and element, once a step.
        element_bytes: memory per local parameter element.
        limit_bytes: what tensors of a device may take.
        leaving: of every block, seconds of sending its outputs on and their gradients back, in each state.
        modes: allowed recomputation, False for none and True for full.
    """

    micro_batches: int
    element_s: float
    once_s: float
    reduction_s: dict[str, float]
    element_bytes: float
    limit_bytes: float
    leaving: tuple[Array, ...] = ()
    modes: tuple[bool, ...] = (False, True)


@dataclass(frozen=True, order=True)
class Position:
    """A stage in its pipeline.

    Attributes:
        held: fewest micro-batches that it holds at its peak.
        warm: most forwards that it runs before its first backward.
    """

    held: int
    warm: int


def positions(stages: int, micro_batches: int) -> list[Position]:
    """Of every stage, under any of the schedules."""
    return [Position(k, k) for k in (min(micro_batches, stages - stage) for stage in range(stages))]


def weights_of(terms: StageTerms, price: float, at: Position, recompute: bool, critical: bool) -> Weights:
    """Weights of one stage.

    Args:
        price: seconds per byte of its memory.
        critical: with what happens once a step, shared out over micro-batches, and less the forwards that run before
            the first backward.
    """
    count = terms.micro_batches
    again, held = 1.0 if recompute else 0.0, price * at.held
    return Weights(
        forward=again + (1.0 - (at.warm - 1) / count if critical else 1.0),
        element_s=terms.element_s + price * terms.element_bytes + (terms.once_s / count if critical else 0.0),
        reduction_s={a: s / count for a, s in terms.reduction_s.items()} if critical else {},
        made_s=0.0,
        **{"entering_s" if recompute else "kept_s": held},
    )


@dataclass(frozen=True)
class Relaxation:
    """Least seconds of every run of blocks as every stage, for one placement of shared parameters.

    Attributes:
        before: ``[stage, a, b]``: one micro-batch of blocks a..b-1 as that stage, sent on to the next.
        critical: likewise, with its share of what happens once a step.
    """

    before: Array
    critical: Array
    micro_batches: int

    def least(self) -> float:
        """Seconds of a step, whatever the cut."""
        return least_total(self.before, self.extra)

    def of_cut(self, cut: Sequence[int]) -> float:
        """Seconds of a step, cut so."""
        ends = (*cut[1:], self.critical.shape[1])
        at = list(zip(range(len(cut)), cut, ends, strict=True))
        return float(sum(self.before[where] for where in at) + max(self.extra[where] for where in at))

    @property
    def extra(self) -> Array:
        """What a stage adds to the time of one micro-batch through all stages, if it is the critical one."""
        possible = np.isfinite(self.before)
        return np.where(possible, self.micro_batches * self.critical - np.where(possible, self.before, 0.0), np.inf)


def relax(tables: ChainTables, terms: StageTerms, stages: Sequence[Position]) -> list[Relaxation]:
    """The relaxation for every placement of shared parameters."""
    return [_relax(tables, terms, stages, shared) for shared in tables.boundaries.shared]


def lower_bound(relaxed: Sequence[Relaxation]) -> float:
    """Seconds of a step that no plan that fits can beat; infinite where none fits."""
    return min(one.least() for one in relaxed)


def _relax(tables: ChainTables, terms: StageTerms, stages: Sequence[Position], shared: Shared) -> Relaxation:
    unit = _free_seconds(tables, terms, shared) / terms.limit_bytes
    prices = [unit * price for price in PRICES]
    room = terms.limit_bytes - _workspaces(tables)
    merged = _merged(stages)
    kinds = sorted(set(merged))
    before, critical = (
        _relaxed(tables, terms, shared, prices, kinds, room, is_critical) for is_critical in (False, True)
    )
    index = [kinds.index(one) for one in merged]
    return Relaxation(before[index], critical[index], terms.micro_batches)


def _merged(stages: Sequence[Position]) -> list[Position]:
    """At most :data:`MOST_POSITIONS` different ones: neighbours count as if they held the fewest and ran the most
    forwards among them, which makes a bound weaker, not wrong."""
    known = sorted(set(stages))
    size = -(-len(known) // MOST_POSITIONS)
    groups = [known[i : i + size] for i in range(0, len(known), size)]
    joined = {one: Position(min(p.held for p in g), max(p.warm for p in g)) for g in groups for one in g}
    return [joined[one] for one in stages]


def _free_seconds(tables: ChainTables, terms: StageTerms, shared: Shared) -> float:
    """Of one micro-batch through all blocks, memory for free."""
    least = tables.least([weights_of(terms, 0.0, Position(1, 1), False, True)])
    times = spans(tables, least, 1, dict.fromkeys(least, (0,)), shared)
    return float(times[0, 0, -1])


def _relaxed(
    tables: ChainTables,
    terms: StageTerms,
    shared: Shared,
    prices: Sequence[float],
    kinds: Sequence[Position],
    room: Array,
    critical: bool,
) -> Array:
    """Seconds of blocks a..b-1 as one stage, ``[position, a, b]``: the best of the prices."""
    kept = _least_kept(tables)
    found = np.empty((len(kinds), *room.shape))
    for i, at in enumerate(kinds):

        def at_prices(chosen: Sequence[float], at: Position = at) -> tuple[dict[Slot, Minimum], Array]:
            least = tables.least([weights_of(terms, p, at, mode, critical) for mode in terms.modes for p in chosen])
            return least, _paid(tables, terms, least, chosen, kept, room, shared, critical)

        least, best = at_prices(prices)
        turns = _turns(least, prices) if len(terms.modes) > 1 else []
        found[i] = (np.maximum(best, at_prices(turns)[1]) if turns else best).min(axis=0)
    return found


def _paid(
    tables: ChainTables,
    terms: StageTerms,
    least: Mapping[Slot, Minimum],
    prices: Sequence[float],
    kept: Mapping[Slot, float],
    room: Array,
    shared: Shared,
    critical: bool,
) -> Array:
    """Least seconds less the price of what fits, ``[largest recomputed block, a, b]``: the best of the prices.

    Whichever recomputed block keeps the most, its activations lie there while it runs again.
    """
    leaving, each = () if critical else terms.leaving, []
    for most in _largest_again(kept, terms.modes):
        allowed = {slot: _allowed(terms.modes, nbytes <= most) for slot, nbytes in kept.items()}
        times = spans(tables, least, len(terms.modes), allowed, shared, leaving)
        each.append(np.max(times - np.array(prices)[:, None, None] * (room - max(0.0, most)), axis=0))
    return np.array(each)


def _turns(least: Mapping[Slot, Minimum], prices: Sequence[float]) -> list[float]:
    """Prices at which some kind of block turns from keeping its activations to recomputing them."""
    found = set()
    for one in least.values():
        keep, again = one.table.reshape(2, len(prices), -1).min(axis=2)
        gain = keep - again
        for i in range(len(prices) - 1):
            if gain[i] < 0.0 <= gain[i + 1]:
                found.add(prices[i] + (prices[i + 1] - prices[i]) * gain[i] / (gain[i] - gain[i + 1]))
    return sorted(found)


def _largest_again(kept: Mapping[Slot, float], modes: Sequence[bool]) -> list[float]:
    """What the largest recomputed block may keep; negative: none is recomputed."""
    return [*([-1.0] if False in modes else []), *(sorted(set(kept.values())) if True in modes else [])]


def _allowed(modes: Sequence[bool], again: bool) -> list[int]:
    """Which modes a block may take; one that must be recomputed always may, as others may be larger."""
    return [i for i, recompute in enumerate(modes) if again or not recompute or False not in modes]


def _least_kept(tables: ChainTables) -> dict[Slot, float]:
    """Bytes that a block of every kind keeps at least, if it is not recomputed."""
    least = tables.least([Weights(forward=0.0, backward=0.0, kept_s=1.0, made_s=0.0)])
    return {slot: float(found.table.min()) for slot, found in least.items()}


def spans(
    tables: ChainTables,
    least: Mapping[Slot, Minimum],
    modes: int,
    allowed: Mapping[Slot, Sequence[int]],
    shared: Shared,
    leaving: Sequence[Array] = (),
) -> Array:
    """Least seconds of blocks a..b-1, ``[case, a, b]``; infinite where b <= a.

    Args:
        least: of every kind of block, all cases of the first mode, then all of the next, ``modes`` in all.
        allowed: the modes of every kind of block; each block takes the one that it likes best.
        leaving: of every block, seconds of sending its outputs on, in each state.
    """
    count = len(tables.blocks)
    cases = len(next(iter(least.values())).table) // modes
    matrices: dict[Slot, Array] = {}
    found = np.full((cases, count, count + 1), np.inf)
    now: Array | None = None  # [a, case, state]
    for index in range(count):
        slot = tables.slots[index]
        if slot not in matrices:
            every = tables.matrix(index, least[slot], shared)
            matrices[slot] = every.reshape(modes, cases, *every.shape[1:])[list(allowed[slot])].min(axis=0)
        matrix = matrices[slot]
        fresh = np.zeros((1, cases, matrix.shape[1]))
        now = fresh if now is None else np.concatenate([now, fresh])
        now = _through(now, matrix)
        ended = now + leaving[index] if leaving else now
        found[:, : index + 1, index + 1] = ended.min(axis=2).T
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


def least_total(before: Array, extra: Array) -> float:
    """The least, over cuts, of ``sum_j before_j + max_i extra_i``, from below.

    Args:
        before, extra: ``[stage, a, b]``, of blocks a..b-1 as that stage.
    """
    finite = extra[np.isfinite(extra)]
    if not len(finite) or (most := _least_sum(before, extra, float(finite.max()))) == np.inf:
        return float("inf")
    low, high = float(finite.min()), float(finite.max())
    while high - low > PRECISION * abs(high):
        middle = (low + high) / 2
        low, high = (low, middle) if _least_sum(before, extra, middle) < np.inf else (middle, high)
    found = np.inf  # between two limits on the extra, the sum is at least that of the upper and the extra the lower
    while low + most < found:
        upper = low + STEP * (abs(low) + most)
        found = min(found, low + _least_sum(before, extra, upper))
        low = upper
    return float(found)


def _least_sum(before: Array, extra: Array, limit: float) -> float:
    """The least sum over cuts whose every stage adds at most ``limit``; infinite where there is none."""
    count = before.shape[1]
    reached = np.full(count + 1, np.inf)
    reached[0] = 0.0
    for mine, added in zip(before, extra, strict=True):
        reached = np.where(added <= limit, reached[:-1, None] + mine, np.inf).min(axis=0)
    return float(reached[-1])


def fill(pp: int, micro_batches: int) -> float:
    """Least step time of a pipeline over the time of one micro-batch through all of it.

    Stage s waits for the stages before it on the way in and out and works on every micro-batch:
    ``step >= sum_{i<s} t_i + m t_s``. The stage times that level these give ``1 / (1 - (1 - 1/m)^pp)``.
    """
    return float(1.0 / (1.0 - (1.0 - 1.0 / micro_batches) ** pp))
