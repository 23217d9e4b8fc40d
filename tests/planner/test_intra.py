"""The program's layouts are as cheap as the cheapest of all layouts, tried one by one."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import pytest

from autopar.cost.engine import Engine
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import Block, OpGraph
from autopar.plan import Layout, Mesh
from autopar.planner.intra import Problem, solve
from autopar.planner.prices import BlockPrices, Weights, boundary_specs
from autopar.sharding.placement import R, S
from autopar.sharding.resolve import resolve
from autopar.sharding.rules import strategies
from tests.planner.models import RESIDUAL, TIED, TWO_LINEARS, job_of

OPTIMIZER_S, REDUCTION_S = 1e-9, 2e-9  # per element


def weights(micro_batches: int) -> Weights:
    return Weights(element_s=OPTIMIZER_S / micro_batches, reduction_s={"tp": REDUCTION_S / micro_batches})


def seconds_of(engine: Engine, graph: OpGraph, block: Block, layout: Layout, mesh: Mesh, micro_batches: int) -> float:
    """What the engine says of a layout, plus the optimizer of this test."""
    cost = engine.block_cost(graph, block, layout, mesh)
    total = cost.forward_s + cost.backward_s + cost.communication("forward") + cost.communication("backward")
    total += OPTIMIZER_S * sum(cost.parameter_elements) / micro_batches
    total += REDUCTION_S * sum(cost.step_reduction_bytes.values()) / 4 / micro_batches
    return total


def cheapest(engine: Engine, graph: OpGraph, block: Block, mesh: Mesh, micro_batches: int) -> float:
    """The best of every combination of strategies and boundary placements."""
    best = math.inf
    per_node = [[str(s) for s in strategies(graph, graph.nodes[n], mesh.tp)] for n in block.nodes]
    ends = [boundary_specs(graph, n, {"tp": mesh.tp}) for n in (*block.inputs, *block.outputs)]
    for texts in product(*per_node):
        for specs in product(*ends):
            named = [{"tp": str(spec[0])} for spec in specs]
            layout = Layout(
                operators={label: {"tp": text} for label, text in zip(block.labels, texts, strict=True)},
                inputs=named[: len(block.inputs)],
                outputs=named[len(block.inputs) :],
            )
            try:
                best = min(best, seconds_of(engine, graph, block, layout, mesh, micro_batches))
            except PlanError:
                continue
    return best


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (TWO_LINEARS, {"width": 64, "hidden": 4096, "bias": True}),
        (TWO_LINEARS, {"width": 1024, "hidden": 32, "bias": False}),
        (RESIDUAL, {"width": 512}),
        (TIED, {"width": 4096}),
    ],
    ids=["wide", "narrow", "residual", "tied"],
)
def test_equals_enumeration(text: str, sizes: dict[str, object], tp: int, tmp_path: Path) -> None:
    job = job_of(text, tmp_path, **sizes)
    graph = capture(job, 8)
    engine = Engine(lambda n: capture(job, n), Cluster.load("local-cpu-4"))
    mesh = Mesh(tp=tp)
    for block in graph.blocks:
        prices = BlockPrices(graph, block, mesh, engine)
        free = Problem(prices, (None,) * len(block.inputs), (None,) * len(block.outputs), weights=weights(2))
        solution = solve(free)
        assert solution is not None
        resolve(graph, block, solution.layout, mesh)
        mine = seconds_of(engine, graph, block, solution.layout, mesh, 2)
        assert mine == pytest.approx(cheapest(engine, graph, block, mesh, 2), rel=1e-6)
        assert solution.seconds == pytest.approx(mine, rel=1e-6)


def test_boundaries_are_those_asked_for(tmp_path: Path) -> None:
    job = job_of(TWO_LINEARS, tmp_path, width=64, hidden=128, bias=True)
    graph = capture(job, 8)
    engine = Engine(lambda n: capture(job, n), Cluster.load("local-cpu-2"))
    block = graph.blocks[0]
    for spec in (R, S(0)):
        ends = tuple(
            (spec,) if (spec,) in boundary_specs(graph, n, {"tp": 2}) else (R,) for n in (*block.inputs, *block.outputs)
        )
        inputs, outputs = ends[: len(block.inputs)], ends[len(block.inputs) :]
        solution = solve(Problem(BlockPrices(graph, block, Mesh(tp=2), engine), inputs, outputs))
        assert solution is not None
        assert (solution.inputs, solution.outputs) == (inputs, outputs)
        assert solution.layout.outputs == [{"tp": str(p[0])} for p in outputs]
