"""Measures a cluster's own machine and writes the profile."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from autopar.cost.compute import ComputeModel
from autopar.cost.operators import attributes_of
from autopar.errors import ProfileError
from autopar.hardware.cluster import Cluster
from autopar.hardware.profiles import (
    Fingerprint,
    MeasuredCollective,
    MeasuredGraph,
    MeasuredMemory,
    MeasuredOperator,
    MeasuredOperators,
    Overheads,
    Profile,
)
from autopar.model.graph import OpGraph
from autopar.profiler.common import common_tasks
from autopar.profiler.tasks import OperatorTask, tasks_of
from autopar.profiler.workers import Order, run_workers

METHOD = (
    "all processes of a node at once; operators called at local shapes, forward and backward apart, warmed up, lower "
    "quartile over a window of at least three samples; collectives in all groups of a size at once, each after a "
    "stretch of compute, median; all as the mean over processes"
)
SAVE_EVERY = 40
STALE_DAYS = 180  # drivers, microcode and neighbours change
Progress = Callable[[int, int, str], None]


def threads_per_process(cluster: Cluster) -> int:
    """Threads of each local process: the cores, shared out; at least one."""
    return max(1, (os.cpu_count() or 1) // cluster.devices_per_node)


def default_path(cluster: Cluster) -> Path:
    """Where a profile of a cluster is kept unless another place is named: ``./profiles/measured/NAME.json``."""
    return Path("profiles") / "measured" / f"{cluster.name}.json"


def fingerprint(cluster: Cluster) -> Fingerprint:
    """What measurements on this machine for this cluster depend on."""
    return Fingerprint(
        processor=_processor(cluster.device.kind),
        cores=os.cpu_count() or 1,
        processes=cluster.devices_per_node,
        threads=threads_per_process(cluster),
        torch=torch.__version__,
    )


def usable(path: str | Path, cluster: Cluster) -> tuple[Profile | None, str]:
    """A profile that was measured on this machine for this cluster, or None and why it cannot serve.

    Args:
        path: of the profile; it may not exist.
        cluster: what it should have been measured for.
    """
    if not Path(path).is_file():
        return None, "there is none yet"
    try:
        profile = Profile.load(path)
    except ProfileError as error:
        return None, str(error)
    if profile.device != cluster.device.name:
        return None, f"it was measured for the device {profile.device!r}, not {cluster.device.name!r}"
    age = (datetime.datetime.now(datetime.UTC).date() - datetime.date.fromisoformat(profile.date)).days
    if age > STALE_DAYS:
        return None, f"it was measured {age} days ago, on {profile.date}"
    differences = profile.foreign(fingerprint(cluster))
    return (None, f"it was measured with {differences}") if differences else (profile, "")


def profile_model(
    graphs: Sequence[OpGraph],
    cluster: Cluster,
    *,
    path: str | Path | None = None,
    budget_s: float = 45.0,
    axis_sizes: Sequence[int] | None = None,
    model: str | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Measures the operators of a model, the collectives and the overheads of this machine.

    Args:
        graphs: the model captured at each micro-batch size that the search considers.
        cluster: whose devices are this machine's.
        path: where the profile is kept; what it already holds is not measured again.
        budget_s: stop measuring operators after so long.
        axis_sizes: sizes of the axes that operators are sharded over; unset, every divisor of the devices of a node.
        model: source of the model, so that its own optimizer is timed.
        progress: called with (done, of, what).

    Raises:
        RunError: a measuring process failed.
        ProfileError: the cluster's devices are of a kind that this machine lacks.
    """
    per_node = cluster.devices_per_node
    sizes = axis_sizes if axis_sizes is not None else [n for n in range(2, per_node + 1) if per_node % n == 0]
    tasks = tasks_of(graphs, sizes, cluster.device)
    profile = _measure(cluster, tasks, path, budget_s, model, progress, sorted({g.batch_size for g in graphs}))
    profile = with_dispatch(profile, graphs, cluster)
    if path is not None:
        profile.save(path)
    return profile


def with_dispatch(profile: Profile, graphs: Sequence[OpGraph], cluster: Cluster) -> Profile:
    """The profile with what whole graphs took beyond the sum of their operators, per operator call.

    The smallest micro-batch decides: there the operators themselves take least.
    """
    model = ComputeModel(replace(cluster.device.with_profile(profile), dispatch_s=(0.0, 0.0)))
    sums = {graph.batch_size: _operator_sums(graph, model) for graph in graphs}
    measured = tuple(
        replace(g, operators_forward_s=sums[g.micro_batch][0], operators_backward_s=sums[g.micro_batch][1])
        for g in profile.graphs
        if g.micro_batch in sums
    )
    if not measured:
        return profile
    least = min(measured, key=lambda g: g.micro_batch)
    forward = max(0.0, least.forward_s - least.operators_forward_s) / max(1, least.operators)
    backward = max(0.0, least.backward_s - least.operators_backward_s) / max(1, least.operators)
    overheads = replace(profile.overheads, dispatch_forward_s=forward, dispatch_backward_s=backward)
    return replace(profile, overheads=overheads, graphs=measured)


def _operator_sums(graph: OpGraph, model: ComputeModel) -> tuple[float, float]:
    forward = backward = 0.0
    for node in graph.of_kind("op"):
        if not node.outputs:
            continue
        inputs = [graph.nodes[name].outputs[0] for name in node.inputs]
        attributes = attributes_of(graph.fx_node(node.name))
        call = (node.op, inputs, node.outputs)
        forward += model.operator_time(*call, node.forward_flops, "forward", "fp32", attributes)
        if node.requires_grad:
            backward += model.operator_time(*call, node.backward_flops, "backward", "fp32", attributes)
    return forward, backward


def profile_collectives(
    cluster: Cluster, *, path: str | Path | None = None, budget_s: float = 20.0, progress: Progress | None = None
) -> Profile:
    """Measures the collectives and overheads of this machine, without a model.

    Raises:
        RunError: a measuring process failed.
        ProfileError: the cluster's devices are of a kind that this machine lacks.
    """
    return _measure(cluster, [], path, budget_s, None, progress)


def profile_device(
    cluster: Cluster, *, path: str | Path | None = None, budget_s: float = 45.0, progress: Progress | None = None
) -> Profile:
    """Measures common operators over many sizes, collectives and overheads of this machine, without a model.

    Raises:
        RunError: a measuring process failed.
        ProfileError: the cluster's devices are of a kind that this machine lacks.
    """
    return _measure(cluster, common_tasks(), path, budget_s, None, progress)


@dataclass
class _Record:
    """What has been heard so far."""

    operators: list[MeasuredOperator] = field(default_factory=list)
    collectives: list[MeasuredCollective] = field(default_factory=list)
    memory: MeasuredMemory = field(default_factory=MeasuredMemory)
    overheads: Overheads = field(default_factory=Overheads)
    graphs: list[MeasuredGraph] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    unmeasured: int = 0

    def profile(self, cluster: Cluster) -> Profile:
        notes = [METHOD]
        if self.skipped:
            notes.append("not measured: " + "; ".join(f"{op} ({why})" for op, why in self.skipped.items()))
        if self.unmeasured:
            notes.append(f"{self.unmeasured} least important operators left to interpolation when time was up")
        return Profile(
            device=cluster.device.name,
            cluster=cluster.name,
            fingerprint=fingerprint(cluster),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            method=". ".join(notes),
            operators=MeasuredOperators(tuple(self.operators)),
            collectives=tuple(self.collectives),
            memory=self.memory,
            overheads=self.overheads,
            graphs=tuple(self.graphs),
        )


def _measure(
    cluster: Cluster,
    tasks: list[OperatorTask],
    path: str | Path | None,
    budget_s: float,
    model: str | None,
    progress: Progress | None,
    micro_batches: Sequence[int] = (),
) -> Profile:
    _check_device(cluster)
    record = _Record()
    before, _ = usable(path, cluster) if path is not None else (None, "")
    if before is not None:
        record = _Record(
            list(before.operators.entries),
            list(before.collectives),
            before.memory,
            before.overheads,
            list(before.graphs) if not tasks else [],
        )
        known = {(e.op, e.inputs, e.outputs, e.attributes) for e in record.operators}
        tasks = [t for t in tasks if (t.op, t.inputs, t.outputs, t.attributes) not in known]
    need_collectives = cluster.devices_per_node > 1 and not record.collectives
    need_overheads = record.overheads.optimizer_s_per_byte is None
    ends = tuple(sorted({micro_batches[0], micro_batches[-1]})) if micro_batches and tasks else ()
    if tasks or need_collectives or need_overheads:
        order = Order(
            processes=cluster.devices_per_node,
            device="cpu" if cluster.device.kind == "cpu" else "cuda",
            threads=threads_per_process(cluster),
            scope=cluster.links[0].scope if cluster.links else "node",
            collectives=need_collectives,
            overheads=need_overheads,
            tasks=tuple(tasks),
            budget_s=budget_s,
            model=model,
            micro_batches=ends,
        )
        run_workers(order, _listener(record, cluster, path, len(tasks), progress))
    profile = record.profile(cluster)
    if path is not None:
        profile.save(path)
    return profile


def _listener(
    record: _Record, cluster: Cluster, path: str | Path | None, total: int, progress: Progress | None
) -> Callable[[str, Any], None]:
    done = 0

    def hear(kind: str, result: Any) -> None:
        nonlocal done
        label = ""
        if kind == "operator":
            record.operators.append(result)
            done, label = done + 1, result.op
            if path is not None and done % SAVE_EVERY == 0:
                record.profile(cluster).save(path)
        elif kind == "skipped":
            op, why = result
            record.skipped[op] = why
            done, label = done + 1, op
        elif kind == "collective":
            record.collectives.append(result)
            label = f"{result.kind} of {result.size}"
        elif kind == "overheads":
            record.overheads, label = result, "overheads"
        elif kind == "graph":
            record.graphs.append(result)
            label = f"whole graph at {result.micro_batch} samples"
        elif kind == "memory":
            record.memory, label = result, "memory"
        elif kind == "unmeasured":
            record.unmeasured = result
            done, label = total, "time is up"
        if progress:
            progress(done, total, label)

    return hear


def _check_device(cluster: Cluster) -> None:
    kind = cluster.device.kind
    if kind != "cpu" and torch.cuda.device_count() < cluster.devices_per_node:
        raise ProfileError(
            f"cluster {cluster.name!r} needs {cluster.devices_per_node} {kind} devices on this machine, "
            f"{torch.cuda.device_count()} found",
            "Run 'autopar profile' on a node of the cluster, or name a local cluster such as local-cpu-2",
        )


def _processor(kind: str) -> str:
    if kind != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()
