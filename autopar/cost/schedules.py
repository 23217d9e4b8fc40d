"""Pipeline schedules as lists of actions: what each rank does, in the order torch.distributed.pipelining does it.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B (Narayanan et al. 2019, PipeDream; Narayanan et al. 2021,
arXiv 2104.04473); interleaved 1F1B (Narayanan et al. 2021, section 2.2); zero bubble (Qi et al. 2023, arXiv
2401.10241). The V-shaped ones are in :mod:`autopar.cost.schedules_v`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanError


class Action(NamedTuple):
    """One pass of one micro-batch through one stage of the chain.

    Attributes:
        kind: ``F`` forward; ``B`` backward, whole; ``I`` and ``W`` its two parts: gradients of the stage's inputs, then
            gradients of its weights.
    """

    kind: str
    stage: int
    micro_batch: int


PRICED = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble")
V_SHAPED = ("zbv", "dualpipev")


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """The pipeline rank that holds a stage: round-robin, or there and back for V-shaped schedules."""
    if schedule in V_SHAPED and (stage // ranks) % 2:
        return ranks - 1 - stage % ranks
    return stage % ranks


def stages_of_rank(schedule: str, rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages of the chain that one pipeline rank holds, ascending."""
    return tuple(s for s in range(ranks * virtual) if rank_of_stage(schedule, s, ranks) == rank)


@lru_cache(maxsize=256)
def actions(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Per pipeline rank, its actions in order.

    Args:
        schedule: one of :data:`PRICED`.
        ranks: pipeline ranks.
        virtual: stages per rank; see :func:`stages_of_rank`.
        micro_batches: micro-batches of a step.

    Raises:
        PlanError: the schedule is unknown, or does not go with these numbers.
    """
    _check(schedule, ranks, virtual, micro_batches)
    if schedule == "gpipe":
        return tuple(_gpipe(rank, micro_batches) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(_one_f_one_b(rank, ranks, micro_batches) for rank in range(ranks))
    if schedule in LOOPED:
        split = schedule == "interleaved_zero_bubble"
        return tuple(_interleaved(rank, ranks, virtual, micro_batches, split) for rank in range(ranks))
    from autopar.cost.schedules_v import dual_pipe_v, zbv

    make = zbv if schedule == "zbv" else dual_pipe_v
    return tuple(make(rank, ranks, micro_batches) for rank in range(ranks))


def _check(schedule: str, ranks: int, virtual: int, micro_batches: int) -> None:
    if schedule not in PRICED:
        raise PlanError(f"schedule {schedule!r} is unknown", f"Use one of {', '.join(PRICED)}")
    if schedule in ("gpipe", "1f1b") and virtual != 1:
        raise PlanError(f"schedule {schedule!r} has virtual_stages {virtual}", "Use 1, or an interleaved schedule")
    if schedule in V_SHAPED and virtual != 2:
        raise PlanError(f"schedule {schedule!r} has virtual_stages {virtual}", "It needs exactly 2")
    if schedule == "dualpipev" and micro_batches < ranks * virtual:
        raise PlanError(
            f"dualpipev cannot run {micro_batches} micro-batches through {ranks * virtual} stages",
            "Use at least as many micro-batches as stages",
        )
    if schedule in LOOPED and micro_batches % max(1, micro_batches // ranks):
        raise PlanError(
            f"{schedule} cannot run {micro_batches} micro-batches on {ranks} ranks", "Use a multiple of the ranks"
        )


def _gpipe(rank: int, micro_batches: int) -> tuple[Action, ...]:
    forward = [Action("F", rank, i) for i in range(micro_batches)]
    return (*forward, *(Action("B", rank, i) for i in range(micro_batches)))


def _one_f_one_b(rank: int, ranks: int, micro_batches: int) -> tuple[Action, ...]:
    warm_up = min(micro_batches, ranks - rank)
    order = [Action("F", rank, i) for i in range(warm_up)]
    for i in range(micro_batches):
        order.append(Action("B", rank, i))
        if warm_up + i < micro_batches:
            order.append(Action("F", rank, warm_up + i))
    return tuple(order)


def _interleaved(rank: int, ranks: int, virtual: int, micro_batches: int, split: bool) -> tuple[Action, ...]:
    """Rounds of micro-batches, the local stages in turn within a round.

    With ``split`` (ZB1P, Qi et al. 2023, section 2.2) fewer forwards warm up, and from the ``rank``-th backward on each
    is followed by the gradients of weights of the oldest backward that still lacks them.
    """
    per_round = micro_batches // max(1, micro_batches // ranks)
    total = micro_batches * virtual
    warm_up = min((virtual - 1) * per_round + (1 if split else 2) * (ranks - 1 - rank), total)
    counters: dict[tuple[str, int], int] = {}

    def take(kind: str, step: int) -> Action:
        local = (step // per_round) % virtual
        stage = (local if kind == "F" else virtual - 1 - local) * ranks + rank
        index = counters.get((kind, stage), 0)
        counters[kind, stage] = index + 1
        return Action(kind, stage, index)

    order = [take("F", step) for step in range(warm_up)]
    weights = 0
    for step in range(total):
        if warm_up + step < total:
            order.append(take("F", warm_up + step))
        order.append(take("I" if split else "B", step))
        if split and step >= rank:
            order.append(take("W", weights))
            weights += 1
    order.extend(take("W", step) for step in range(weights, total if split else weights))
    return tuple(order)
