"""Explain: where the time and the memory of a plan go, and what would help most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from autopar.cost.estimate import stage_parts
from autopar.plan import MESH_AXES
from autopar.report.subject import Subject
from autopar.report.what_if import Remedy, remedies

NO_HELP = 0.005  # gains below half a percent are noise beside the error of any prediction


@dataclass(frozen=True)
class StageRow:
    """One pipeline rank: its seconds of a step, and its memory in bytes by component.

    Attributes:
        idle_s: waiting for other stages until the last action of the pipeline ends.
    """

    rank: int
    blocks: int
    forward_s: float
    backward_s: float
    idle_s: float
    memory: dict[str, int]
    reserved: int


@dataclass(frozen=True)
class KindRow:
    """All blocks of one kind: device-seconds of a step over all stages, by what they are spent on.

    Attributes:
        communication_s: of the collectives inside the blocks, replayed ones included.
        saved_bytes: kept from forward to backward for one micro-batch, on one device, if nothing is recomputed.
    """

    kind: str
    count: int
    compute_s: float
    communication_s: float
    saved_bytes: int

    @property
    def total_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True)
class Explanation:
    """What a plan spends.

    Attributes:
        components: seconds of a step by component; they add up to the step time.
        kinds: by kind of block, slowest first; with ``between_s`` they add up to what all stages are busy.
        between_s: between blocks: waiting for parameters to be gathered, adding up gradients.
        crosses: mesh axis -> scope of the outermost link that its groups cross.
        remedies: what helps most first.
    """

    components: dict[str, float]
    stages: tuple[StageRow, ...]
    kinds: tuple[KindRow, ...]
    between_s: float
    crosses: dict[str, str]
    remedies: tuple[Remedy, ...]

    @property
    def largest(self) -> str:
        """The component that takes most of the step."""
        return max(self.components, key=lambda name: self.components[name])

    @property
    def bottleneck(self) -> Remedy | None:
        """The resource of the machine whose doubling helps most; None where none helps."""
        best = next((r for r in self.remedies if r.resource != "batch"), None)
        return best if best is not None and best.gain > NO_HELP else None

    def to_json(self) -> dict[str, Any]:
        """The document of ``explain --json``; seconds and bytes."""
        return {
            "breakdown": self.components,
            "largest_component": self.largest,
            "stages": [dict(vars(row)) for row in self.stages],
            "block_kinds": [{**vars(row), "total_s": row.total_s} for row in self.kinds],
            "between_blocks_s": self.between_s,
            "crosses": self.crosses,
            "bottleneck": None if self.bottleneck is None else self.bottleneck.to_json(),
            "remedies": [remedy.to_json() for remedy in self.remedies],
        }


def explain(subject: Subject) -> Explanation:
    """Takes a plan's prediction apart, and re-estimates it with each resource doubled."""
    kinds = _kinds(subject)
    busy = sum(subject.estimate.timeline.busy_s)
    return Explanation(
        components=dict(subject.estimate.breakdown),
        stages=tuple(_stage(subject, rank) for rank in range(subject.plan.mesh.pp)),
        kinds=kinds,
        between_s=busy - sum(row.total_s for row in kinds),
        crosses=crosses(subject),
        remedies=tuple(remedies(subject)),
    )


def crosses(subject: Subject) -> dict[str, str]:
    """For every mesh axis in use, the outermost link that its groups cross."""
    mesh = subject.plan.mesh
    used = [axis for axis in MESH_AXES if getattr(mesh, axis) > 1]
    return {axis: subject.cluster.links[subject.engine.group(mesh, axis).level].scope for axis in used}


def _stage(subject: Subject, rank: int) -> StageRow:
    estimate, count = subject.estimate, subject.plan.micro_batches
    times, memory = [estimate.stage_times[s] for s in estimate.held[rank]], estimate.stages[rank]
    groups = subject.plan.stage_blocks()
    return StageRow(
        rank=rank,
        blocks=sum(len(groups[s]) for s in estimate.held[rank]),
        forward_s=count * sum(t.forward_s for t in times),
        backward_s=count * sum(t.backward_s for t in times),
        idle_s=estimate.timeline.makespan_s - estimate.timeline.busy_s[rank],
        memory=memory_parts(subject, rank),
        reserved=memory.reserved,
    )


def memory_parts(subject: Subject, rank: int) -> dict[str, int]:
    """Bytes of one device of a pipeline rank by component; they add up to its reserved peak."""
    memory = subject.estimate.stages[rank]
    parts = {name: int(value) for name, value in vars(memory).items() if name != "allocator_fraction"}
    return {**parts, "allocator": memory.reserved - sum(parts.values())}


def _kinds(subject: Subject) -> tuple[KindRow, ...]:
    plan = subject.plan
    found: dict[str, KindRow] = {}
    for block, chosen, cost in chain.from_iterable(stage_parts(subject.engine, plan)):
        full = chosen.recompute == "full"
        again = cost.replay_s if full else cost.recompute_s if chosen.recompute == "selective" else 0.0
        wire = sum(cost.communication_s.values()) + (sum(cost.replay_communication_s.values()) if full else 0.0)
        row = found.get(block.kind, KindRow(block.kind, 0, 0.0, 0.0, 0))
        found[block.kind] = KindRow(
            block.kind,
            row.count + 1,
            row.compute_s + plan.micro_batches * (cost.forward_s + cost.backward_s + again),
            row.communication_s + plan.micro_batches * wire,
            row.saved_bytes + cost.saved_bytes,
        )
    return tuple(sorted(found.values(), key=lambda row: -row.total_s))
