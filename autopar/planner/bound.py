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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.chain_tables import ChainTables, Shared
from autopar.planner.elimination import Array, Minimum
from autopar.planner.inter import least_total
from autopar.planner.prices import Weights
from autopar.planner.spans import spans

PRICES = (0.0, *(0.004 * 2.0**i for i in range(12)))  # of memory, in the model's time over a device's memory
MOST_POSITIONS = 8  # stages that are told apart


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
    merged = _merged(stages)
    kinds = sorted(set(merged))
    before, critical = (_relaxed(tables, terms, shared, prices, kinds, is_critical) for is_critical in (False, True))
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
    return float(spans(tables, least, 1, [(0,)] * len(least), shared)[0, 0, -1])


def _relaxed(
    tables: ChainTables,
    terms: StageTerms,
    shared: Shared,
    prices: Sequence[float],
    kinds: Sequence[Position],
    critical: bool,
) -> Array:
    """Seconds of blocks a..b-1 as one stage, ``[position, a, b]``: the best of the prices."""

    def at_prices(chosen: Sequence[Sequence[float]]) -> tuple[list[Minimum], Array]:
        pairs = [(at, price) for at, mine in zip(kinds, chosen, strict=True) for price in mine]
        least = tables.least([weights_of(terms, p, at, mode, critical) for mode in terms.modes for at, p in pairs])
        return least, _paid(tables, terms, least, np.array(chosen), shared, critical)

    least, best = at_prices([prices] * len(kinds))
    if len(terms.modes) > 1:
        turns = _turns(least, prices, len(kinds))
        best = np.maximum(best, at_prices(turns)[1])
    return np.asarray(best.min(axis=0))


def _paid(
    tables: ChainTables, terms: StageTerms, least: Sequence[Minimum], prices: Array, shared: Shared, critical: bool
) -> Array:
    """Least seconds less the price of what fits, at its best price: ``[largest recomputed block, position, a, b]``.

    Whichever recomputed block keeps the most, its activations lie there while it runs again.

    Args:
        prices: ``[position, price]``.
    """
    leaving, each = () if critical else terms.leaving, []
    room = terms.limit_bytes - tables.workspaces
    for most in _largest_again(tables.least_kept, terms.modes):
        allowed = [_allowed(terms.modes, nbytes <= most) for nbytes in tables.least_kept]
        times = spans(tables, least, len(terms.modes), allowed, shared, leaving)
        paid = prices[:, :, None, None] * (room - max(0.0, most))
        each.append(np.max(times.reshape(paid.shape) - paid, axis=1))
    return np.array(each)


def _turns(least: Sequence[Minimum], prices: Sequence[float], positions: int) -> list[list[float]]:
    """For every position, prices at which some kind of block turns from keeping its activations to recomputing them."""
    found: list[list[float]] = [[] for _ in range(positions)]
    for one in least:
        keep, again = one.table.reshape(2, positions, len(prices), -1).min(axis=3)
        for mine, gain in zip(found, keep - again, strict=True):
            for i in range(len(prices) - 1):
                if gain[i] < 0.0 <= gain[i + 1]:
                    mine.append(prices[i] + (prices[i + 1] - prices[i]) * gain[i] / (gain[i] - gain[i + 1]))
    longest = max(1, *map(len, found))
    return [mine + [0.0] * (longest - len(mine)) for mine in found]


def _largest_again(kept: Sequence[float], modes: Sequence[bool]) -> list[float]:
    """What the largest recomputed block may keep; negative: none is recomputed."""
    return [*([-1.0] if False in modes else []), *(sorted(set(kept)) if True in modes else [])]


def _allowed(modes: Sequence[bool], again: bool) -> list[int]:
    """Which modes a block may take; one that must be recomputed always may, as others may be larger."""
    return [i for i, recompute in enumerate(modes) if again or not recompute or False not in modes]


def fill(pp: int, micro_batches: int) -> float:
    """Least step time of a pipeline over the time of one micro-batch through all of it.

    Stage s waits for the stages before it on the way in and out and works on every micro-batch:
    ``step >= sum_{i<s} t_i + m t_s``. The stage times that level these give ``1 / (1 - (1 - 1/m)^pp)``.
    """
    return float(1.0 / (1.0 - (1.0 - 1.0 / micro_batches) ** pp))
