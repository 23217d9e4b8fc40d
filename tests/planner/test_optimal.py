"""For small models the search finds what trying every plan finds: the same step time, in loose and in tight memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest

from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.planner.planner import search
from autopar.planner.prices import boundary_specs
from autopar.sharding.rules import strategies
from tests.planner.models import CHAIN, job_of

WIDE = {"width": 32, "hidden": 4096, "bias": False, "activation": ""}
NARROW = {"width": 2048, "hidden": 16, "bias": False, "activation": ""}
FOUR = {"width": 256, "hidden": 512, "bias": False, "activation": "torch.relu"}
BIAS = {"width": 512, "hidden": 512, "bias": True, "activation": ""}


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def every_layout(graph: OpGraph, tp: int) -> Iterator[list[Layout]]:
    """Every combination of strategies and boundary placements of the whole chain."""
    if tp == 1:
        yield [Layout() for _ in graph.blocks]
        return
    crossing = [name for block in graph.blocks[:-1] for name in block.outputs]
    ops = [
        (block, name, label) for block in graph.blocks for name, label in zip(block.nodes, block.labels, strict=True)
    ]
    choices = [[str(s) for s in strategies(graph, graph.nodes[name], tp)] for _, name, _ in ops]
    for texts in product(*choices):
        for specs in product(*(boundary_specs(graph, name, {"tp": tp}) for name in crossing)):
            placed = {name: {"tp": str(spec[0])} for name, spec in zip(crossing, specs, strict=True)}
            yield [
                Layout(
                    operators={
                        label: {"tp": text} for (b, _, label), text in zip(ops, texts, strict=True) if b is block
                    },
                    inputs=[placed.get(name, {}) for name in block.inputs],
                    outputs=[placed.get(name, {}) for name in block.outputs],
                )
                for block in graph.blocks
            ]


def every_plan(engine: Engine, devices: int, global_batch: int) -> Iterator[Plan]:
    """Every mesh, micro-batch, schedule, cut, recomputation and layout."""
    for pp in divisors(devices):
        for tp in divisors(devices // pp):
            dp = devices // pp // tp
            for shard in divisors(dp):
                mesh = Mesh(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)
                for micro_batch in divisors(global_batch // dp) if global_batch % dp == 0 else []:
                    yield from plans_of(engine, mesh, micro_batch, global_batch)


def plans_of(engine: Engine, mesh: Mesh, micro_batch: int, global_batch: int) -> Iterator[Plan]:
    graph, count = engine.graph(micro_batch), global_batch // mesh.dp // micro_batch
    names = [block.name for block in graph.blocks]
    schedules = ["1f1b"] if mesh.pp == 1 else ["gpipe", "1f1b"] if count >= mesh.pp else ["gpipe"]
    cuts = [(names[0], *inner) for inner in combinations(names[1:], mesh.pp - 1)]
    for layouts in every_layout(graph, mesh.tp):
        for schedule, cut, again in product(schedules, cuts, product(("none", "full"), repeat=len(names))):
            yield Plan(
                model=ModelRef(source="", fingerprint=graph.fingerprint),
                cluster=ClusterRef(name="test", devices=mesh.devices),
                global_batch=global_batch,
                mesh=mesh,
                stages=list(cut),
                blocks=[BlockPlan(name=n, layout=n, recompute=r) for n, r in zip(names, again, strict=True)],
                layouts=dict(zip(names, layouts, strict=True)),
                zero_stage=3 if mesh.dp_shard > 1 else 0,
                schedule=schedule,
                micro_batch=micro_batch,
                micro_batches=count,
            )


def with_memory(cluster: Cluster, limit: int) -> Cluster:
    """The cluster with another memory limit per device."""
    groups = tuple(
        replace(g, device=replace(g.device, memory_bytes=limit + cluster.memory_reserve_bytes)) for g in cluster.groups
    )
    return replace(cluster, groups=groups)


@pytest.mark.parametrize(
    ("sizes", "cluster", "global_batch"),
    [
        (WIDE, "local-cpu-2", 8),
        (NARROW, "local-cpu-2", 8),
        (FOUR, "local-cpu-2", 4),
        (BIAS, "local-cpu-2", 4),
        (WIDE, "local-cpu-4", 4),
        (NARROW, "local-cpu-4", 4),
        (FOUR, "dgx-h100-8", 4),
    ],
    ids=["wide-2", "narrow-2", "four-2", "bias-2", "wide-4", "narrow-4", "four-8"],
)
def test_search_equals_enumeration(sizes: dict[str, object], cluster: str, global_batch: int, tmp_path: Path) -> None:
    job, where = job_of(CHAIN, tmp_path, **sizes), Cluster.load(cluster)
    engine = Engine(lambda n: capture(job, n), where)
    priced: list[Estimate] = []
    for plan in every_plan(engine, where.devices, global_batch):
        try:
            priced.append(engine.estimate(plan))
        except PlanError:  # placements that do not go together
            continue
    best = min(priced, key=lambda e: e.step_time_s)
    least = min(e.peak_reserved for e in priced)
    for limit in (where.memory_limit_bytes, (best.peak_reserved + least) // 2, least):
        fitting = min(e.step_time_s for e in priced if e.peak_reserved <= limit)
        found = search(job, with_memory(where, limit), global_batch)
        assert found.plans[0].estimate["step_time_s"] == pytest.approx(fitting, rel=1e-9), f"limit {limit}"
        assert found.lower_bound_s <= fitting * (1 + 1e-9)
