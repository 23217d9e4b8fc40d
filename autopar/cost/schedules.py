"""Pipeline schedules as lists of actions: what each rank does, in the order torch.distributed.pipelining does it.

Sources: GPipe (Huang et al. 2019, arXiv 1811.06965); 1F1B (Narayanan et al. 2019, PipeDream; Narayanan et al. 2021,
arXiv 2104.04473); interleaved 1F1B (Narayanan et al. 2021, section 2.2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from autopar.errors import PlanError


class Action(NamedTuple):
    """One forward (``F``) or backward (``B``) of one micro-batch through one stage of the chain."""

    kind: str
    stage: int
    micro_batch: int


PRICED = ("gpipe", "1f1b", "interleaved_1f1b")


@lru_cache(maxsize=4096)
def actions(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Per pipeline rank, its actions in order.

    Args:
        schedule: one of :data:`PRICED`.
        ranks: pipeline ranks.
        virtual: stages per rank; stage ``s`` is on rank ``s % ranks``.
        micro_batches: micro-batches of a step.

    Raises:
        PlanError: the schedule is not priced, or does not go with these numbers.
    """
    if schedule == "gpipe":
        return tuple(_gpipe(rank, micro_batches) for rank in range(ranks))
    if schedule == "1f1b":
        return tuple(_one_f_one_b(rank, ranks, micro_batches) for rank in range(ranks))
    if schedule == "interleaved_1f1b":
        if micro_batches % max(1, micro_batches // ranks):
            raise PlanError(
                f"interleaved_1f1b cannot run {micro_batches} micro-batches on {ranks} ranks",
                "Use a multiple of the pipeline size",
            )
        return tuple(_interleaved(rank, ranks, virtual, micro_batches) for rank in range(ranks))
    raise PlanError(f"schedule {schedule!r} cannot be priced yet", f"Use one of {', '.join(PRICED)}")


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


def _interleaved(rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[Action, ...]:
    """As ``_get_1f1b_rank_ops`` of torch: rounds of micro-batches, the local stages in turn within a round."""
    per_round = micro_batches // max(1, micro_batches // ranks)
    total = micro_batches * virtual

    def stage_of(step: int, backward: bool) -> int:
        local = (step // per_round) % virtual
        return (virtual - 1 - local if backward else local) * ranks + rank

    warm_up = min((virtual - 1) * per_round + 2 * (ranks - 1 - rank), total)
    warm_up = total if micro_batches == ranks and warm_up > total else warm_up
    counters: dict[tuple[str, int], int] = {}

    def take(kind: str, step: int) -> Action:
        stage = stage_of(step, kind == "B")
        index = counters.get((kind, stage), 0)
        counters[kind, stage] = index + 1
        return Action(kind, stage, index)

    order = [take("F", step) for step in range(warm_up)]
    for step in range(total):
        if warm_up + step < total:
            order.append(take("F", warm_up + step))
        order.append(take("B", step))
    return tuple(order)
