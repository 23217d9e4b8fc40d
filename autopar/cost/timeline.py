"""Timeline: plays a pipeline schedule action by action; each rank does one action at a time, sends take time.

An action starts when its rank is free and what it needs has arrived: a forward the activations of the stage before, a
backward the gradients of the stage after (the last stage's own forward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.schedules import Action, actions


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one micro-batch.

    Attributes:
        send_s: sending its activations on, and likewise the gradients back over the same boundary.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """One action with its start and end, in seconds from the start of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A played schedule.

    Attributes:
        events: in the order they start on each rank.
        makespan_s: end of the last action.
        busy_s: per rank, seconds in actions.
        in_flight: per stage, the most micro-batches whose activations were held at once.
    """

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    in_flight: tuple[int, ...]


def play(schedule: str, ranks: int, virtual: int, micro_batches: int, stages: Sequence[StageTime]) -> Timeline:
    """Simulates one step.

    Args:
        schedule, ranks, virtual, micro_batches: as in :func:`autopar.cost.schedules.actions`.
        stages: of the chain, ``ranks * virtual`` of them.

    Raises:
        PlanError: the schedule cannot be priced with these numbers.
    """
    queues = actions(schedule, ranks, virtual, micro_batches)
    position, free, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    done: dict[Action, float] = {}
    rank_of = {action.stage: rank for rank, queue in enumerate(queues) for action in queue}
    events: list[Event] = []
    remaining, waiting = sum(map(len, queues)), list(range(ranks))
    while remaining:
        progressed = False
        for rank in waiting:
            queue = queues[rank]
            while position[rank] < len(queue):
                action = queue[position[rank]]
                ready = _ready(action, len(stages), done, stages, rank_of)
                if ready is None:
                    break
                start = max(free[rank], ready)
                stage = stages[action.stage]
                duration = stage.forward_s if action.kind == "F" else stage.backward_s
                free[rank] = done[action] = start + duration
                busy[rank] += duration
                events.append(Event(rank, action, start, free[rank]))
                position[rank] += 1
                remaining -= 1
                progressed = True
        assert progressed, "the schedule waits for itself"
    return Timeline(tuple(events), max(free), tuple(busy), _in_flight(queues, len(stages)))


def _ready(
    action: Action, count: int, done: dict[Action, float], stages: Sequence[StageTime], rank_of: dict[int, int]
) -> float | None:
    """When the inputs of an action have arrived, or None while their producer has not run."""
    kind, stage, micro_batch = action
    if kind == "F":
        if stage == 0:
            return 0.0
        before, boundary = Action("F", stage - 1, micro_batch), stage - 1
    elif stage == count - 1:
        return done.get(Action("F", stage, micro_batch))
    else:
        before, boundary = Action("B", stage + 1, micro_batch), stage
    end = done.get(before)
    if end is None:
        return None
    local = rank_of[before.stage] == rank_of[stage]
    return end if local else end + stages[boundary].send_s


def _in_flight(queues: Sequence[Sequence[Action]], count: int) -> tuple[int, ...]:
    most, now = [0] * count, [0] * count
    for queue in queues:
        for action in queue:
            now[action.stage] += 1 if action.kind == "F" else -1
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)
