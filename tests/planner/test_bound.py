"""No plan beats the bound: plans drawn at random, with a memory limit that just lets them fit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.engine import Engine
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import load
from autopar.plan import BlockPlan, ClusterRef, Layout, ModelRef, Plan
from autopar.planner.candidate import LEVELS, Evaluator
from autopar.planner.space import Candidate, Pins, candidates, schedules_of
from tests.planner.test_optimal import with_memory

ZOO = Path(__file__).parents[2] / "autopar/zoo"
BATCH = 16
JOBS = {name: load(str(ZOO / f"{name}.py")) for name in ("gpt", "seq2seq")}
GRAPHS: dict[tuple[str, int], OpGraph] = {}


def graph_of(name: str, batch: int, cluster: Cluster) -> OpGraph:
    key = (name, batch)
    if key not in GRAPHS:
        GRAPHS[key] = capture(JOBS[name], batch, cluster.device.kind)
    return GRAPHS[key]


def some_plan(evaluator: Evaluator, candidate: Candidate, draw: random.Random) -> Plan:
    """Layouts of a drawn price of memory, cut, recomputed and scheduled at random."""
    case = evaluator._case(candidate)
    graph = case.graph
    names = [block.name for block in graph.blocks]
    chain = case.chain(draw.choice([0.0, 1.0, 100.0]), draw.random() < 0.5)
    cut = [0, *sorted(draw.sample(range(1, len(names)), candidate.mesh.pp - 1))]
    layouts: dict[str, Layout] = dict(zip(names, chain.layouts, strict=True))
    share = draw.random()
    return Plan(
        model=ModelRef(source="", fingerprint=graph.fingerprint),
        cluster=ClusterRef(name="test", devices=candidate.mesh.devices),
        global_batch=BATCH,
        mesh=candidate.mesh,
        stages=[names[i] for i in cut],
        blocks=[BlockPlan(name=n, layout=n, recompute="full" if draw.random() < share else "none") for n in names],
        layouts=layouts,
        zero_stage=candidate.zero_stage,
        schedule=draw.choice(schedules_of(candidate, Pins())),
        micro_batch=candidate.micro_batch,
        micro_batches=candidate.micro_batches,
    )


@pytest.mark.parametrize("name", sorted(JOBS))
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_no_plan_that_fits_beats_the_bound(name: str, seed: int) -> None:
    draw, cluster = random.Random(seed), Cluster.load("dgx-a100-8")
    if draw.random() < 0.5:  # a slow device, where compute counts for more than latencies
        slow = replace(cluster.device, memory_bandwidth=cluster.device.memory_bandwidth / 50)
        cluster = replace(cluster, groups=tuple(replace(g, device=slow) for g in cluster.groups))
    engine = Engine(lambda n: graph_of(name, n, cluster), cluster)
    blocks = len(engine.graph(1).blocks)
    every = [c for c in candidates(8, BATCH, Pins()) if c.micro_batch in (1, 2) and c.mesh.pp <= blocks]
    candidate = draw.choice(every)
    plan = some_plan(Evaluator(engine, JOBS[name], BATCH), candidate, draw)
    try:
        priced = engine.estimate(plan)
    except PlanError:
        return
    tight = with_memory(cluster, priced.peak_reserved)
    evaluator = Evaluator(Engine(engine.graph, tight), JOBS[name], BATCH)
    for level in range(LEVELS + 1):
        assert evaluator.bound(candidate, level, Pins()) <= priced.step_time_s * (1 + 1e-9)
