"""Timeline: plays a pipeline schedule action by action; each rank does one action at a time, sends take time.

An action starts when its rank is free and what it needs has arrived: a forward the activations of the stage before, a
backward the gradients of the stage after (the last stage's own forward), gradients of weights the stage's own
gradients of inputs. Sends do not hold up the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

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
        queues: per rank, its actions in order.
        ends_s: per rank, the end of each of its actions.
        durations_s: per stage, seconds by kind of action.
        makespan_s: end of the last action.
        busy_s: per rank, seconds in actions.
        in_flight: per stage, the most micro-batches whose activations were held at once (until the backward, or the
            gradients of weights where they come apart from it).
    """

    queues: tuple[tuple[Action, ...], ...]
    ends_s: tuple[tuple[float, ...], ...]
    durations_s: tuple[dict[str, float], ...]
    makespan_s: float
    busy_s: tuple[float, ...]
    in_flight: tuple[int, ...]

    def events(self) -> Iterator[Event]:
        """All actions with their times, rank by rank."""
        for rank, (queue, ends) in enumerate(zip(self.queues, self.ends_s, strict=True)):
            for action, end in zip(queue, ends, strict=True):
                yield Event(rank, action, end - self.durations_s[action.stage][action.kind], end)


def play(schedule: str, ranks: int, virtual: int, micro_batches: int, stages: Sequence[StageTime]) -> Timeline:
    """Simulates one step.

    Args:
        schedule, ranks, virtual, micro_batches: as in :func:`autopar.cost.schedules.actions`.
        stages: of the chain, ``ranks * virtual`` of them.

    Raises:
        PlanError: the schedule does not go with these numbers.
    """
    queues = actions(schedule, ranks, virtual, micro_batches)
    durations = tuple(_durations(stage, first=i == 0) for i, stage in enumerate(stages))
    board = _Board(stages, [rank_of_stage(schedule, s, ranks) for s in range(len(stages))], micro_batches)
    ends: list[list[float]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        queue, mine, now = queues[rank], ends[rank], free[rank]
        while len(mine) < len(queue):
            kind, stage, micro_batch = queue[len(mine)]
            ready = board.ready(kind, stage, micro_batch)
            if ready is None:
                break
            now = (ready if ready > now else now) + durations[stage][kind]
            mine.append(now)
            reader = board.post(kind, stage, micro_batch, now)
            if reader is not None and reader != rank:
                waiting.append(reader)
        free[rank] = now
    assert all(len(mine) == len(queue) for mine, queue in zip(ends, queues, strict=True)), "a schedule waits for itself"
    return Timeline(
        queues=queues,
        ends_s=tuple(map(tuple, ends)),
        durations_s=durations,
        makespan_s=max(free),
        busy_s=tuple(sum(durations[stage][kind] for kind, stage, _ in queue) for queue in queues),
        in_flight=_in_flight(schedule, ranks, virtual, micro_batches),
    )


def _durations(stage: StageTime, first: bool) -> dict[str, float]:
    """Seconds by kind of action; the first stage has no gradients of inputs, all its backward is for weights."""
    weight = stage.backward_s if first else stage.weight_s
    return {"F": stage.forward_s, "B": stage.backward_s, "I": stage.backward_s - weight, "W": weight}


class _Board:
    """Where finished passes are posted for those that wait for them.

    Args:
        stages: their times.
        ranked: the rank of each stage.
        micro_batches: of a step.
    """

    def __init__(self, stages: Sequence[StageTime], ranked: Sequence[int], micro_batches: int) -> None:
        self.ranked, self.last = ranked, len(stages) - 1
        self.forward: list[list[float | None]] = [[None] * micro_batches for _ in stages]
        self.backward: list[list[float | None]] = [[None] * micro_batches for _ in stages]
        apart = [a != b for a, b in pairwise(ranked)]
        self.wire = [stage.send_s if far else 0.0 for stage, far in zip(stages, apart, strict=False)]

    def ready(self, kind: str, stage: int, micro_batch: int) -> float | None:
        """When the inputs of a pass have arrived, or None while their producer has not run."""
        if kind == "F":
            if stage == 0:
                return 0.0
            end = self.forward[stage - 1][micro_batch]
            return None if end is None else end + self.wire[stage - 1]
        if kind == "W":
            return self.backward[stage][micro_batch]
        if stage == self.last:
            return self.forward[stage][micro_batch]
        end = self.backward[stage + 1][micro_batch]
        return None if end is None else end + self.wire[stage]

    def post(self, kind: str, stage: int, micro_batch: int, end: float) -> int | None:
        """Notes the end of a pass; gives the rank that may have waited for it."""
        if kind == "W":
            return None
        if kind == "F":
            self.forward[stage][micro_batch] = end
            return self.ranked[stage + 1] if stage < self.last else None
        self.backward[stage][micro_batch] = end
        return self.ranked[stage - 1] if stage else None


@lru_cache(maxsize=1024)
def _in_flight(schedule: str, ranks: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Most micro-batches held per stage: the order on its rank alone decides."""
    most, now = [0] * (ranks * virtual), [0] * (ranks * virtual)
    for queue in actions(schedule, ranks, virtual, micro_batches):
        for kind, stage, _ in queue:
            if kind == "F":
                now[stage] += 1
                most[stage] = max(most[stage], now[stage])
            elif kind != "I":
                now[stage] -= 1
    return tuple(most)
