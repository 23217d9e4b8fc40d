"""Tables over all boundaries hold what the integer program finds for each boundary, and what the engine says of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.engine import Engine
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.plan import Mesh
from autopar.planner.elimination import Elimination, TooLarge
from autopar.planner.intra import Problem, solve
from autopar.planner.prices import ENTERING, KEPT, BlockPrices, Weights, boundary_specs
from autopar.planner.tables import BlockTables

ZOO = Path(__file__).parents[2] / "autopar/zoo"
KINDS = [
    Weights(),
    Weights(forward=2.0, element_s=1e-12, reduction_s={"tp": 2e-12}, entering_s=1e-13),
    Weights(element_s=3e-12, kept_s=1e-12),
]


@st.composite
def sums(draw: st.DrawFn) -> tuple[dict[str, int], list[tuple[str, ...]], tuple[str, ...]]:
    sizes = {name: draw(st.integers(1, 3)) for name in "abcdef"}
    scopes = draw(st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True), max_size=8))
    kept = draw(st.lists(st.sampled_from("abcdef"), max_size=2, unique=True))
    return sizes, [tuple(scope) for scope in scopes], tuple(kept)


@given(sums(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_elimination_equals_enumeration(
    problem: tuple[dict[str, int], list[tuple[str, ...]], tuple[str, ...]], seed: int
) -> None:
    sizes, scopes, kept = problem
    numbers = np.random.default_rng(seed)
    tables = [numbers.integers(0, 9, (2, *(sizes[n] for n in scope))).astype(float) for scope in scopes]
    found = Elimination(sizes, scopes, kept).run(tables)

    def total(case: int, values: dict[str, int]) -> float:
        return sum(t[(case, *(values[n] for n in s))] for t, s in zip(tables, scopes, strict=True))

    every = [dict(zip(sizes, v, strict=True)) for v in itertools.product(*map(range, sizes.values()))]
    for case in range(2):
        for at in itertools.product(*(range(sizes[n]) for n in kept)):
            matching = [v for v in every if all(v[n] == i for n, i in zip(kept, at, strict=True))]
            least = min(total(case, v) for v in matching)
            row = found.table[case if found.table.shape[0] > 1 else 0]
            assert row[at] == least
            values = found.values(case, at)
            assert total(case, values) == least
            assert all(values[n] == i for n, i in zip(kept, at, strict=True))


def test_what_is_too_large_is_refused() -> None:
    names = [f"v{i}" for i in range(6)]
    with pytest.raises(TooLarge):
        Elimination(dict.fromkeys(names, 10), list(itertools.combinations(names, 2)), (), most=1000)


@pytest.mark.parametrize("name", ["gpt", "moe", "seq2seq", "vit"])
def test_tables_equal_the_program_and_the_engine(name: str) -> None:
    job, cluster = load(str(ZOO / f"{name}.py")), Cluster.load("dgx-h100-8")
    graph = capture(job, 4, cluster.device.kind, "bf16")
    engine, mesh = Engine(lambda n: graph, cluster, "bf16"), Mesh(tp=2)
    for blocks in graph.block_kinds().values():
        block = blocks[0]
        prices = BlockPrices(graph, block, mesh, engine)
        inputs, outputs = (
            [boundary_specs(graph, n, prices.sizes) for n in names] for names in (block.inputs, block.outputs)
        )
        tables = BlockTables(prices, inputs, outputs)
        least = tables.least(KINDS)
        for case, weights in enumerate(KINDS):
            free = solve(Problem(prices, (None,) * len(inputs), (None,) * len(outputs), weights=weights))
            assert free is not None
            assert least.table[case].min() == pytest.approx(free.seconds, rel=1e-6)
            at = tuple(int(i) for i in np.unravel_index(least.table[case].argmin(), least.table[case].shape))
            cost = engine.block_cost(graph, block, tables.layout(least, case, at), mesh)
            parts = tables.parts(least, case, at)
            forward = cost.forward_s + cost.communication("forward")
            backward = cost.backward_s + cost.communication("backward")
            assert (parts[0], parts[1]) == pytest.approx((forward, backward), rel=1e-9)
            assert parts[2] == sum(cost.parameter_elements)
            assert parts[KEPT] <= cost.saved_bytes + sum(cost.saved_input_bytes)
            assert parts[ENTERING] == sum(cost.input_bytes)
            total = parts @ replace(weights).vector(prices.axes)
            assert total == pytest.approx(least.table[case][at], rel=1e-9)
