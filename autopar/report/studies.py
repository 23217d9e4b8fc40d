"""Studies: searches over many settings, as DataFrames that plots and notebooks read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from autopar.errors import InputError, NoPlanFits
from autopar.hardware.cluster import Cluster
from autopar.model.spec import TrainingJob
from autopar.plan import Plan
from autopar.planner.planner import search
from autopar.report.tables import step_time_s, tokens_per_s

EVERY = 1000  # more plans than any search ranks


def plan_row(plan: Plan) -> dict[str, Any]:
    """The numbers of one plan: mesh in words, sizes, and its estimate."""
    estimate = plan.estimate
    return {
        "mesh": plan.mesh.describe(),
        "devices": plan.cluster.devices,
        "global_batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule if plan.mesh.pp > 1 else "-",
        "step_time_s": step_time_s(plan),
        "tokens_per_s": tokens_per_s(plan),
        "mfu": estimate["mfu"],
        "peak_reserved_gib": estimate["peak_reserved_gib"],
        "memory_limit_gib": estimate["memory_limit_gib"],
    }


def visited(
    job: TrainingJob, cluster: Cluster, global_batch: int, precision: str = "fp32", **settings: Any
) -> pd.DataFrame:
    """The best plan of every mesh and micro-batch that fits, fastest first.

    Args:
        settings: further arguments of :func:`autopar.planner.planner.search`, such as ``pins``.
    """
    found = search(job, cluster, global_batch, precision, top=EVERY, **settings)
    return pd.DataFrame([plan_row(plan) for plan in found.plans])


def over_batches(
    job: TrainingJob, cluster: Cluster, batches: Sequence[int], precision: str = "fp32", **settings: Any
) -> pd.DataFrame:
    """The best plan at each global batch; a batch at which nothing fits has no row."""
    return _table([(job, cluster, batch, {}) for batch in batches], precision, settings)


def over_lengths(
    jobs: Mapping[int, TrainingJob], cluster: Cluster, tokens: int, precision: str = "fp32", **settings: Any
) -> pd.DataFrame:
    """The best plan at each sequence length, at the same tokens a step; a length at which nothing fits has no row.

    Args:
        jobs: sequence length -> the model with samples of that length.
        tokens: of a step; lengths that do not divide them take fewer.
    """
    cases = [(job, cluster, max(1, tokens // n), {"sequence_length": n}) for n, job in jobs.items()]
    return _table(cases, precision, settings)


def over_clusters(
    job: TrainingJob,
    clusters: Mapping[Any, Cluster],
    global_batch: int,
    column: str,
    precision: str = "fp32",
    **settings: Any,
) -> pd.DataFrame:
    """The best plan on each cluster (of other bandwidths, memory, ...); what tells them apart is in ``column``."""
    cases = [(job, cluster, global_batch, {column: value}) for value, cluster in clusters.items()]
    return _table(cases, precision, settings)


def over_devices(
    job: TrainingJob,
    cluster: Cluster,
    counts: Sequence[int],
    global_batch: int,
    precision: str = "fp32",
    **settings: Any,
) -> pd.DataFrame:
    """Strong scaling at the global batch, weak scaling at the same samples a device as on all of them.

    Raises:
        InputError: a count is not a part of the cluster.
    """
    cases = []
    for count in counts:
        part = part_of(cluster, count)
        cases.append((job, part, global_batch, {"kind": "strong"}))
        share = global_batch * count // cluster.devices
        if share and global_batch * count % cluster.devices == 0:
            cases.append((job, part, share, {"kind": "weak"}))
    return _table(cases, precision, settings)


def _table(
    cases: Sequence[tuple[TrainingJob, Cluster, int, dict[str, Any]]], precision: str, settings: Mapping[str, Any]
) -> pd.DataFrame:
    rows = []
    for job, cluster, batch, named in cases:
        try:
            plan = search(job, cluster, batch, precision, top=1, **settings).plans[0]
        except NoPlanFits:
            continue
        rows.append({**named, **plan_row(plan)})
    return pd.DataFrame(rows)


def part_of(cluster: Cluster, devices: int) -> Cluster:
    """The first devices of a cluster of like nodes: part of one node, or whole nodes.

    Raises:
        InputError: they are neither, or the cluster has unlike nodes or fewer devices.
    """
    (group, *others), inside = cluster.groups, cluster.devices_per_node
    whole = devices % inside == 0 or (devices < inside and inside % devices == 0)
    if others or not 1 <= devices <= cluster.devices or not whole:
        raise InputError(
            f"{devices} devices are not a part of cluster {cluster.name!r}",
            f"Use a divisor of {inside} or a multiple of it up to {cluster.devices}, of a cluster of like nodes",
        )
    nodes = max(1, devices // inside)
    links, below = [], 1
    for link in cluster.links:
        if below < devices:
            links.append(replace(link, devices=min(link.devices, devices)))
            below = links[-1].devices
    smaller = replace(group, nodes=nodes, devices_per_node=devices // nodes)
    return replace(cluster, groups=(smaller,), links=tuple(links or cluster.links[:1]))
