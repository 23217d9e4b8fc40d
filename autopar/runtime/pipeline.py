"""Pipeline schedules: the plan's schedule on torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.errors import PlanError
from autopar.model.graph import OpGraph
from autopar.plan import Plan
from autopar.runtime.stage import crossing

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
V_SHAPED = ("zbv", "dualpipev")
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")  # gradients of weights later than those of inputs


def stages_of_rank(schedule: str, rank: int, ranks: int, virtual: int) -> list[int]:
    """Which stages of the chain one pipeline rank holds.

    Round-robin for looped schedules; for V-shaped ones the second half returns in reverse (Qi et al. 2024, ZB-V).

    Raises:
        PlanError: the schedule does not go with that number of virtual stages.
    """
    if schedule in SINGLE and virtual != 1:
        raise PlanError(f"schedule {schedule!r} has virtual_stages {virtual}", "Use 1, or an interleaved schedule")
    if schedule in V_SHAPED:
        if virtual != 2:
            raise PlanError(f"schedule {schedule!r} has virtual_stages {virtual}", "It needs exactly 2")
        return [rank, 2 * ranks - 1 - rank]
    return [rank + i * ranks for i in range(virtual)]


def check_schedule(graph: OpGraph, plan: Plan) -> None:
    """Refuses a schedule that torch would fail on in the middle of a step.

    Raises:
        PlanError: there are fewer micro-batches than 1F1B's stages, or a schedule that splits the backward pass meets
            a stage with several inputs that carry gradients (torch walks the part of the graph that they share twice).
    """
    if plan.mesh.pp == 1:
        return
    if plan.schedule == "1f1b" and plan.micro_batches < plan.mesh.pp:
        raise PlanError(
            f"schedule '1f1b' has {plan.micro_batches} micro-batches for {plan.mesh.pp} stages",
            f"Use at least {plan.mesh.pp} micro-batches, or gpipe",
        )
    if plan.schedule not in SPLIT_BACKWARD:
        return
    names = [b.name for b in graph.blocks]
    entering = crossing(graph, [names.index(first) for first in plan.stages])
    for first, activations in zip(plan.stages, entering, strict=False):
        moving = [a for a in activations if graph.nodes[a].requires_grad]
        if len(moving) > 1:
            raise PlanError(
                f"schedule {plan.schedule!r} cannot split the backward pass of the stage from block {first!r}: "
                f"{len(moving)} activations with gradients enter it ({', '.join(moving)})",
                "Use 1f1b, gpipe or interleaved_1f1b",
            )


def weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The micro-batch's share of the global mean; torch's schedules call this as their loss function.

    A micro-batch without a valid label has the share 0, though its own mean is 0/0.
    """
    share = weight.sum()
    return torch.where(share > 0, loss, torch.zeros_like(loss)) * share


def make_schedule(schedule: str, stages: Sequence[PipelineStage], micro_batches: int) -> Any:
    """The schedule object; gradients are not scaled again, since the loss is already a share of the global mean.

    Raises:
        PlanError: torch refuses the number of stages or micro-batches.
    """
    try:
        if schedule in SINGLE:
            return SINGLE[schedule](stages[0], micro_batches, loss_fn=weighted, scale_grads=False)
        return MULTI[schedule](list(stages), micro_batches, loss_fn=weighted, scale_grads=False)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise PlanError(f"schedule {schedule!r} cannot run {micro_batches} micro-batches: {error}") from None
