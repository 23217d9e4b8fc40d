"""Recomputation: which blocks run their forward again, so that every stage fits at the least extra time.

Blocks of one kind under one layout are alike, so the choice on a pipeline rank is how many of each kind; few
combinations are all tried, cheapest first, and many are walked by bytes freed per second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

from autopar.cost.memory import Part, rank_memory
from autopar.hardware.device import Device
from autopar.plan import BlockPlan, Plan

MOST_COMBINATIONS = 600


def recompute_to_fit(
    plan: Plan, ranks: Sequence[Sequence[tuple[Sequence[Part], int]]], device: Device, limit_bytes: int
) -> Plan | None:
    """The plan with the cheapest recomputation that fits, or None where none does.

    Args:
        plan: without recomputation.
        ranks: for each pipeline rank the stages it holds: parts, and micro-batches in flight.
        limit_bytes: what one device may take.
    """
    chosen: set[str] = set()
    for stages in ranks:
        names = _cheapest(plan, stages, device, limit_bytes)
        if names is None:
            return None
        chosen |= names
    return with_recompute(plan, chosen)


def with_recompute(plan: Plan, names: set[str]) -> Plan:
    """The plan with exactly these blocks recomputed."""
    blocks = [b.model_copy(update={"recompute": "full" if b.name in names else "none"}) for b in plan.blocks]
    return plan.model_copy(update={"blocks": blocks})


def _cheapest(
    plan: Plan, stages: Sequence[tuple[Sequence[Part], int]], device: Device, limit_bytes: int
) -> set[str] | None:
    for names in _choices(stages):
        if rank_memory(plan, _apply(stages, names), device).reserved <= limit_bytes:
            return names
    return None


def _apply(stages: Sequence[tuple[Sequence[Part], int]], names: set[str]) -> list[tuple[list[Part], int]]:
    def changed(part: Part) -> Part:
        block, chosen, cost = part
        wanted = "full" if block.name in names else "none"
        return block, BlockPlan(name=chosen.name, layout=chosen.layout, recompute=wanted), cost  # type: ignore[arg-type]

    return [([changed(part) for part in parts], in_flight) for parts, in_flight in stages]


def _choices(stages: Sequence[tuple[Sequence[Part], int]]) -> Iterator[set[str]]:
    """Sets of block names to recompute, by ascending extra time."""
    kinds: dict[tuple[str, str], list[str]] = {}
    price: dict[tuple[str, str], tuple[float, float]] = {}
    for parts, in_flight in stages:
        for block, chosen, cost in parts:
            key = (block.kind, chosen.layout)
            kinds.setdefault(key, []).append(block.name)
            freed = in_flight * max(0, cost.saved_bytes - sum(cost.input_bytes))
            price[key] = (cost.forward_s + cost.communication("forward"), freed)
    keys = list(kinds)
    if math.prod(len(names) + 1 for names in kinds.values()) <= MOST_COMBINATIONS:
        counts = product(*(range(len(kinds[key]) + 1) for key in keys))
        ordered = sorted(counts, key=lambda c: (sum(n * price[k][0] for n, k in zip(c, keys, strict=True)), c))
        for chosen_counts in ordered:
            yield {name for n, key in zip(chosen_counts, keys, strict=True) for name in kinds[key][:n]}
        return
    keys.sort(key=lambda key: price[key][0] / max(price[key][1], 1.0))
    names: set[str] = set()
    yield set()
    for key in keys:
        for name in kinds[key]:
            names.add(name)
            yield set(names)
