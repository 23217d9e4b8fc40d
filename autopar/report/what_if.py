"""What if: the same plan re-estimated with one resource doubled; the resource that helps most is the bottleneck."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from autopar.cost.compute import ComputeModel
from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster
from autopar.plan import Plan
from autopar.report.subject import Subject


@dataclass(frozen=True)
class Remedy:
    """One thing doubled.

    Attributes:
        resource: ``compute``, ``link``, ``memory`` or ``batch``.
        where: scope of the link; how memory or the batch is used.
        step_time_s: predicted with it.
        gain: tokens per second with it over those without, less 1.
    """

    resource: str
    where: str
    step_time_s: float
    gain: float

    def to_json(self) -> dict[str, Any]:
        """The documented keys of ``explain --json``."""
        return dict(vars(self))


def remedies(subject: Subject) -> list[Remedy]:
    """Everything doubled in turn, what helps most first; a change of the plan that does not fit is left out."""
    found = [_remedy(subject, "compute", "", _twice_as_fast(subject).estimate(subject.plan))]
    for level, link in enumerate(subject.cluster.links):
        engine = _engine(subject, faster_link(subject.cluster, level))
        found.append(_remedy(subject, "link", link.scope, engine.estimate(subject.plan)))
    memory = subject.cluster.device.memory_bytes + subject.estimate.memory_limit
    unused = [_remedy(subject, "memory", "", subject.estimate)]  # the plan has no use for more
    found += _best(subject, "memory", _uses_of_memory(subject.plan), memory) or unused
    found += _best(subject, "batch", _larger_batches(subject.plan), subject.estimate.memory_limit)
    return sorted(found, key=lambda remedy: -remedy.gain)


def faster_link(cluster: Cluster, level: int, factor: float = 2.0) -> Cluster:
    """The cluster with the bandwidth of one link level multiplied; collectives measured there take 1 / ``factor``."""
    links = tuple(
        replace(link, bandwidth=link.bandwidth * factor) if i == level else link for i, link in enumerate(cluster.links)
    )
    scope = cluster.links[level].scope
    measured = tuple(
        replace(entry, seconds=entry.seconds / factor) if entry.scope == scope else entry
        for entry in cluster.collectives
    )
    return replace(cluster, links=links, collectives=measured)


def _engine(subject: Subject, cluster: Cluster) -> Engine:
    return Engine(subject.engine.graph, cluster, subject.plan.precision, subject.engine.trainer)


class _TwiceAsFast:
    """A compute model whose every operator and kernel takes half the time."""

    def __init__(self, slower: ComputeModel) -> None:
        self.slower = slower

    def operator_time(self, *args: Any, **named: Any) -> float:
        return self.slower.operator_time(*args, **named) / 2

    def memory_time(self, *args: Any, **named: Any) -> float:
        return self.slower.memory_time(*args, **named) / 2

    @cached_property
    def device(self) -> Any:
        return self.slower.device


def _twice_as_fast(subject: Subject) -> Engine:
    device = replace(subject.cluster.device, memory_bandwidth=2 * subject.cluster.device.memory_bandwidth)
    first, *others = subject.cluster.groups
    cluster = replace(subject.cluster, groups=(replace(first, device=device), *others))
    engine = _engine(subject, cluster)
    engine.compute = cast(ComputeModel, _TwiceAsFast(subject.engine.compute))
    return engine


def _remedy(subject: Subject, resource: str, where: str, estimate: Estimate) -> Remedy:
    gain = estimate.tokens / estimate.step_time_s / subject.tokens_per_s - 1
    return Remedy(resource, where, estimate.step_time_s, gain)


def _best(subject: Subject, resource: str, changes: Iterator[tuple[str, Plan]], limit: int) -> list[Remedy]:
    """The change that helps most of those within the limit, as a list of one or none."""
    found = []
    for where, plan in changes:
        try:
            estimate = subject.engine.estimate(plan)
        except AutoparError:  # the schedule does not go with so few micro-batches
            continue
        if estimate.peak_reserved <= limit:
            found.append(_remedy(subject, resource, where, estimate))
    return sorted(found, key=lambda remedy: -remedy.gain)[:1]


def _uses_of_memory(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans that take more memory to save time: one change each, then together."""
    changes: list[tuple[str, Callable[[Plan], Plan | None]]] = [
        ("no recomputation", _without_recomputation),
        ("micro-batch doubled", _larger_micro_batch),
        ("parameters replicated", _replicated),
    ]
    together = plan
    words: list[str] = []
    for word, change in changes:
        alone = change(plan)
        if alone is not None:
            yield word, alone
        both = change(together)
        if both is not None:
            together, words = both, [*words, word]
    if len(words) > 1:
        yield ", ".join(words), together


def _without_recomputation(plan: Plan) -> Plan | None:
    if all(block.recompute == "none" for block in plan.blocks):
        return None
    return plan.model_copy(update={"blocks": [b.model_copy(update={"recompute": "none"}) for b in plan.blocks]})


def _larger_micro_batch(plan: Plan) -> Plan | None:
    if plan.micro_batches % 2:
        return None
    return plan.model_copy(update={"micro_batch": plan.micro_batch * 2, "micro_batches": plan.micro_batches // 2})


def _replicated(plan: Plan) -> Plan | None:
    if plan.mesh.dp_shard == 1:
        return None
    mesh = plan.mesh.model_copy(update={"dp_shard": 1, "dp_replicate": plan.mesh.dp})
    return plan.model_copy(update={"mesh": mesh, "zero_stage": 0})


def _larger_batches(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Twice the global batch, in more or in larger micro-batches."""
    twice = {"global_batch": 2 * plan.global_batch}
    yield "more micro-batches", plan.model_copy(update={**twice, "micro_batches": 2 * plan.micro_batches})
    yield "larger micro-batches", plan.model_copy(update={**twice, "micro_batch": 2 * plan.micro_batch})
