"""Stages: where the chain of blocks is cut for pipeline parallelism.

A synchronous pipeline takes the time of one micro-batch through all stages and, for every further micro-batch, the
time of the slowest stage (Zheng et al. 2022, arXiv 2201.12023, section 5). Few cuts are all tried; among many, dynamic
programming finds the one that is best by that formula for every bound on the slowest stage. The engine's simulator
decides between what is found here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Cut = tuple[int, ...]  # first block of every stage; begins with 0
MOST_ENUMERATED = 64
MOST_BOUNDS = 12
PRECISION, STEP = 1e-4, 1e-3  # of the bisection, and between limits on what the critical stage adds
Array = NDArray[np.float64]


@dataclass(frozen=True)
class BlockLoad:
    """One block as the cutting sees it.

    Attributes:
        seconds: forward and backward of one micro-batch, with its share of what happens once a step.
        forward_s: of one micro-batch; the price of recomputing it.
        send_s: sending its outputs on and their gradients back, if a stage ends after it.
        fixed_bytes: parameters, gradients and optimizer states.
        saved_bytes, recomputed_bytes: activations of one micro-batch, without and with recomputation.
    """

    seconds: float
    forward_s: float
    send_s: float
    fixed_bytes: float
    saved_bytes: float
    recomputed_bytes: float


def cuts(times: Array, send: Sequence[float], micro_batches: int) -> list[Cut]:
    """Ways to cut worth pricing, most promising first.

    Args:
        times: ``[stage, a, b]``: seconds per micro-batch of blocks a..b-1 as that stage, infinite where it cannot be.
        send: of every block, seconds to send its outputs on and their gradients back.
        micro_batches: per step.

    Returns:
        All of them where they are few, else the best by formula; none where there are fewer blocks than stages.
    """
    stages, count = times.shape[0], times.shape[1]
    if stages > count:
        return []
    if math.comb(count - 1, stages - 1) <= MOST_ENUMERATED:
        every = [(0, *inner) for inner in combinations(range(1, count), stages - 1)]
        return sorted(every, key=lambda cut: (_formula(cut, times, send, micro_batches), cut))
    return _by_programming(times, send, micro_batches)


def stage_times(
    loads: Sequence[BlockLoad], in_flight: Sequence[int], memory_bytes: float, may_recompute: bool
) -> Array:
    """Seconds per micro-batch of blocks i..j-1 as stage s, at [s, i, j]; as much recomputed as memory asks for.

    Infinite where even full recomputation does not fit.

    Args:
        in_flight: per stage, the most micro-batches it holds at once.
        memory_bytes: what a stage may take.
    """

    def spans(values: list[float]) -> Array:
        total = np.concatenate([[0.0], np.cumsum(values)])
        return np.asarray(total[None, :] - total[:, None])

    seconds, forward = spans([b.seconds for b in loads]), spans([b.forward_s for b in loads])
    fixed = spans([b.fixed_bytes for b in loads])
    saved, least = spans([b.saved_bytes for b in loads]), spans([b.recomputed_bytes for b in loads])
    found = np.empty((len(in_flight), len(loads), len(loads) + 1))
    for stage in range(len(in_flight)):
        missing = fixed + in_flight[stage] * saved - memory_bytes
        gain = np.maximum(in_flight[stage] * (saved - least), 1e-9)
        share = np.clip(missing / gain, 0.0, None)
        time = seconds + np.minimum(share, 1.0) * forward
        found[stage] = np.where(share > (1.0 if may_recompute else 0.0), np.inf, time)[:-1]
    return found


def _formula(cut: Cut, times: Array, send: Sequence[float], micro_batches: int) -> float:
    ends = (*cut[1:], times.shape[1])
    each = [times[s, i, j] for s, (i, j) in enumerate(zip(cut, ends, strict=True))]
    sent = sum(send[j - 1] for j in cut[1:])
    if math.inf in each:
        return math.inf
    return float(sum(each) + sent + (micro_batches - 1) * max(each))


def _by_programming(times: Array, sends: Sequence[float], micro_batches: int) -> list[Cut]:
    """The best cut under each of a few bounds on the slowest stage, ascending from the least possible one."""
    finite = np.unique(times[np.isfinite(times) & (times > 0)])
    if not len(finite):
        return []
    send, stages = np.array([0.0, *sends]), len(times)
    low, high = 0, len(finite) - 1
    if _under(finite[high], times, send, stages) is None:
        return []
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _under(finite[middle], times, send, stages) is None else (low, middle)
    found: dict[Cut, float] = {}
    slack = finite[low] * (1.0 + 1.0 / micro_batches)  # beyond, what the sum can win the bottleneck loses
    bounds = [b for b in finite[low:] if b <= slack]
    for bound in bounds[:: max(1, len(bounds) // MOST_BOUNDS)]:
        cut = _under(bound, times, send, stages)
        if cut is not None:
            found[cut] = _formula(cut, times, sends, micro_batches)
    return sorted(found, key=lambda cut: (found[cut], cut))


def _under(bound: float, times: Array, send: Array, stages: int) -> Cut | None:
    """The cut of least total time whose slowest stage is within a bound."""
    count = times.shape[1]
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((stages + 1, count + 1), dtype=int)
    upper = np.triu(np.ones((count, count + 1), dtype=bool), 1)
    sent = np.where(np.arange(count) > 0, send[:-1], 0.0)
    for s in range(stages):
        allowed = np.where(upper & (times[s] <= bound), times[s], np.inf)
        total = (best[s][:-1] + sent)[:, None] + allowed
        came[s + 1], best[s + 1] = total.argmin(axis=0), total.min(axis=0)
    if not np.isfinite(best[stages, count]):
        return None
    cut, end = [], count
    for s in range(stages, 0, -1):
        end = int(came[s, end])
        cut.append(end)
    return tuple(reversed(cut))


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
