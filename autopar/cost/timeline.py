"""Timeline: plays a pipeline schedule action by action; each rank does one action at a time, sends take time.

An action starts when its rank is free and what it needs has arrived: a forward the activations of the stage before, a
backward the gradients of the stage after (the last stage's own forward), gradients of weights the stage's own
gradients of inputs. Sends do not hold up the sender.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.schedules import Action, actions, rank_of_stage


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage for one micro-batch.

    Attributes:
        send_s: sending its activations on, and likewise the gradients back over the same boundary.
        weight_s: the part of ``backward_s`` that gives gradients of weights, where a schedule separates it.
    """

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    weight_s: float = 0.0


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
        in_flight: per stage, the most micro-batches whose activations were held at once (until the backward, or the
            gradients of weights where they come apart from it).
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
    ranked = [rank_of_stage(schedule, stage, ranks) for stage in range(len(stages))]
    durations = [_durations(stage, first=i == 0) for i, stage in enumerate(stages)]
    position, free, busy = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    done: dict[tuple[bool, int, int], float] = {}  # (forward?, stage, micro-batch): its end
    events: list[Event] = []
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        queue = queues[rank]
        while position[rank] < len(queue):
            action = queue[position[rank]]
            ready = _ready(action, done, stages, ranked)
            if ready is None:
                break
            start, duration = max(free[rank], ready), durations[action.stage][action.kind]
            free[rank] = start + duration
            busy[rank] += duration
            events.append(Event(rank, action, start, free[rank]))
            position[rank] += 1
            if action.kind != "W":
                done[action.kind == "F", action.stage, action.micro_batch] = free[rank]
                reader = action.stage + (1 if action.kind == "F" else -1)
                if 0 <= reader < len(stages) and ranked[reader] != rank:
                    waiting.append(ranked[reader])
    assert all(at == len(queue) for at, queue in zip(position, queues, strict=True)), "the schedule waits for itself"
    return Timeline(tuple(events), max(free), tuple(busy), _in_flight(queues, len(stages)))


def _durations(stage: StageTime, first: bool) -> dict[str, float]:
    """Seconds by kind of action; the first stage has no gradients of inputs, all its backward is for weights."""
    weight = stage.backward_s if first else stage.weight_s
    return {"F": stage.forward_s, "B": stage.backward_s, "I": stage.backward_s - weight, "W": weight}


def _ready(
    action: Action, done: dict[tuple[bool, int, int], float], stages: Sequence[StageTime], ranked: Sequence[int]
) -> float | None:
    """When the inputs of an action have arrived, or None while their producer has not run."""
    kind, stage, micro_batch = action
    if kind == "W":
        return done.get((False, stage, micro_batch))
    if kind == "F":
        if stage == 0:
            return 0.0
        before, boundary = stage - 1, stage - 1
    elif stage == len(stages) - 1:
        return done.get((True, stage, micro_batch))
    else:
        before, boundary = stage + 1, stage
    end = done.get((kind == "F", before, micro_batch))
    if end is None:
        return None
    return end if ranked[before] == ranked[stage] else end + stages[boundary].send_s


def _in_flight(queues: Sequence[Sequence[Action]], count: int) -> tuple[int, ...]:
    most, now = [0] * count, [0] * count
    for queue in queues:
        for action in queue:
            now[action.stage] += {"F": 1, "I": 0}.get(action.kind, -1)
            most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)
