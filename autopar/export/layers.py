"""The plan as other trainers see it: a stack of like layers between an embedding and a head."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.plan import Plan

_NUMBERED = re.compile(r"(?:(.*)\.)?(\d+)")


@dataclass(frozen=True)
class Stack:
    """The numbered blocks of a plan.

    Attributes:
        names: of the layers, in order.
        stages: for each stage of the chain, the positions of its layers in ``names``.
        single: one run of layers with all else before or after it, and no stage boundary inside that else.
        recomputed: for each stage, how many of its layers are fully recomputed.
        recomputed_first: these are the first ones of each stage.
    """

    names: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    single: bool
    recomputed: tuple[int, ...]
    recomputed_first: bool


def stack_of(plan: Plan) -> Stack:
    """The layers of a plan: the blocks whose names end in a number, as ``model.layers.7``."""
    matches = {b.name: m for b in plan.blocks if (m := _NUMBERED.fullmatch(b.name))}
    position = {name: i for i, name in enumerate(matches)}
    every = [b.name for b in plan.blocks]
    inside = every[every.index(next(iter(matches))) : every.index(next(reversed(matches))) + 1] if matches else []
    single = len({m[1] for m in matches.values()}) == 1 and len(inside) == len(matches)
    stages, again, first = [], [], True
    for number, blocks in enumerate(plan.stage_blocks()):
        layers = [b for b in blocks if b.name in position]
        stages.append(tuple(position[b.name] for b in layers))
        full = [b.recompute == "full" for b in layers]
        again.append(sum(full))
        first = first and full == sorted(full, reverse=True)
        if not layers and 0 < number < len(plan.stages) - 1:
            single = False
    if len(plan.stages) > 1 and single:
        # what lies before the first layer stays in the first stage, what lies after the last one in the last
        single = plan.stage_blocks()[0][0].name == every[0] and _ends_whole(plan, every, position)
    return Stack(tuple(position), tuple(stages), single, tuple(again), first)


def _ends_whole(plan: Plan, every: list[str], position: dict[str, int]) -> bool:
    before = every[: next(i for i, name in enumerate(every) if name in position)]
    after = every[len(before) + len(position) :]
    groups = [{b.name for b in blocks} for blocks in plan.stage_blocks()]
    return set(before) <= groups[0] and set(after) <= groups[-1]


def sequence_parallel(plan: Plan) -> bool:
    """Whether activations between layers are cut along the sequence over the tensor-parallel ranks."""
    return any(p.get("tp", "R").startswith("S(1") for layout in plan.layouts.values() for p in layout.outputs)


def recompute_kinds(plan: Plan) -> set[str]:
    """The kinds of recomputation of the layers (of all blocks where none is numbered)."""
    layers = set(stack_of(plan).names)
    return {b.recompute for b in plan.blocks if b.name in layers or not layers}
