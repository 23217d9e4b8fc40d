"""The parity matrix: plans of every kind for models of every kind train as one process does.

Losses and gradient norms of five steps and the final parameters; fp32 to 1e-4, bf16 and fp16 to 1e-2 of the loss
and 5e-2 of the norm.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.plan import Mesh
from autopar.runtime.parallelize import ParallelModel, check_runnable, parallelize
from autopar.runtime.topology import build_topology
from autopar.sharding.placement import R, S
from autopar.sharding.redistribute import Conversion
from autopar.sharding.resolve import conversion_steps, resolve_plan
from tests.distributed.matrix import GLOBAL_BATCH, MODELS, Case, graph_of, plan_of, small
from tests.distributed.reference import Reference, single_process
from tests.processes import Group

STEPS = 5
NAMES = tuple(MODELS)
V_SHAPED = ("zbv", "dualpipev")
LOOPED = ("interleaved_1f1b", "interleaved_zero_bubble")


def fixed_cases() -> list[Case]:
    """The list that every change runs: each mesh with several models, each model with several meshes."""
    two = ["dp_replicate=2", "dp_shard=2", "tp=2", "cp=2", "pp=2"]
    four = [
        "dp_replicate=2 tp=2",
        "dp_shard=2 tp=2",
        "dp_replicate=2 dp_shard=2",
        "pp=2 tp=2",
        "pp=2 dp_shard=2",
        "pp=2 dp_replicate=2",
        "cp=2 tp=2",
        "dp_shard=2 cp=2",
        "tp=4",
        "pp=4",
        "cp=4",
    ]
    cases = [Case(model, mesh, layout_seed=i) for i, model in enumerate(NAMES) for mesh in two]
    for i, mesh in enumerate(four):
        for j in range(2):
            model = NAMES[(i + 2 * j) % len(NAMES)]
            recompute, micro_batches = ("none", "full")[(i + j) % 2], 4 if mesh == "pp=4" else 2
            cases.append(Case(model, mesh, 10 * i + j, micro_batches, recompute=recompute))
    for i, schedule in enumerate(("gpipe", *LOOPED, *V_SHAPED)):
        model = ("gpt", "seq2seq", "tied", "vit", "gpt")[i]
        mesh = ("pp=2 tp=2", "pp=2 dp_shard=2", "pp=2 dp_replicate=2")[i % 3]
        cases.append(Case(model, mesh, layout_seed=i, micro_batches=4, schedule=schedule))
    cases += [Case("moe", "pp=2 tp=2", seed, 4, s) for seed, s in enumerate((LOOPED[1], *V_SHAPED))]
    cases += [Case(model, "dp_shard=2 tp=2", layout_seed=7, precision="bf16") for model in NAMES]
    cases += [Case(model, "pp=2", micro_batches=4, precision="bf16") for model in ("seq2seq", "tied")]
    cases += [Case("gpt", "dp_shard=2 tp=2", 8, precision="fp16"), Case("moe", "pp=2", precision="fp16")]
    cases += [Case(model, "tp=2", layout_seed=9, compile="aot_eager") for model in ("gpt", "vit")]
    cases += [
        Case("gpt", "pp=2 dp_shard=2 tp=2", layout_seed=1),
        Case("tied", "pp=2 dp_replicate=2 tp=2", layout_seed=2, recompute="full"),
        Case("moe", "dp_replicate=2 dp_shard=2 tp=2", layout_seed=3),
        Case("seq2seq", "pp=2 tp=4", layout_seed=4),
    ]
    return cases


CASES = fixed_cases()


def prepare() -> None:
    """What all processes share: the captured models."""
    for name in NAMES:
        for micro_batch in (1, 2, 4):
            graph_of(name, micro_batch)


@lru_cache
def reference(name: str) -> Reference:
    with torch.random.fork_rng():
        job = small(name)
        return single_process(job, [job.example_batch(GLOBAL_BATCH)] * STEPS)


def train(case: Case) -> None:
    """One process's part of a case; raises where anything differs from one process."""
    torch.manual_seed(random.randrange(2**31))  # the user's own random numbers must not matter
    job, plan, want = small(case.model), plan_of(case), reference(case.model)
    check_runnable(plan)
    graph = graph_of(case.model, plan.micro_batch)
    model = ParallelModel(job, plan, graph, resolve_plan(graph, plan), build_topology(plan))
    batch = job.example_batch(GLOBAL_BATCH)
    near, near_norm = (1e-4, 1e-4) if case.precision == "fp32" else (1e-2, 5e-2)
    for step in range(STEPS):
        loss = float(model.step(batch))
        assert loss == pytest.approx(want.losses[step], rel=near), f"loss of step {step + 1}"
        assert model.grad_norm == pytest.approx(want.norms[step], rel=near_norm), f"gradient norm of step {step + 1}"
    whole = model.full_state_dict()
    assert whole.keys() == want.parameters.keys()
    # AdamW moves a parameter by at most about its rate a step, whatever the precision makes of its gradient
    moved = 2e-5 if case.precision == "fp32" else 2.5e-3 * STEPS
    for name, tensor in want.parameters.items():
        torch.testing.assert_close(whole[name], tensor, rtol=1e-4, atol=moved, msg=lambda m, n=name: f"{n}: {m}")


class Groups:
    """One group of processes for each world size, kept from case to case; a broken one is replaced."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def run(self, case: Case) -> None:
        group = self._groups.get(case.world)
        if group is None or not group.alive:
            group = self._groups[case.world] = Group(case.world, prepare)
        group.run(train, case)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    every = Groups()
    yield every
    every.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_equals_one_process(groups: Groups, case: Case) -> None:
    groups.run(case)


def test_schedules_that_torch_fails_on_are_refused() -> None:
    job = small("seq2seq")
    for schedule in (*LOOPED[1:], *V_SHAPED):
        with pytest.raises(PlanError, match=r"activations with gradients enter it .* Use 1f1b"):
            parallelize(job, plan_of(Case("seq2seq", "pp=2", micro_batches=4, schedule=schedule)))
    with pytest.raises(PlanError, match="2 micro-batches for 4 stages"):
        parallelize(job, plan_of(Case("seq2seq", "pp=4")))


def test_a_gather_under_an_inner_shard_of_the_same_dimension_is_refused() -> None:
    """Device (i, j) holds piece 2 i + j; gathering over i alone would pass pieces j and 2 + j off as a half."""
    sizes = {"cp": 2, "tp": 2}
    both = {"cp": S(0), "tp": S(0)}
    for axis, wanted, refused in (("cp", R, True), ("tp", R, False)):
        conversions = {axis: Conversion(S(0), wanted)}
        if refused:
            with pytest.raises(PlanError, match="while an inner axis splits the same dimension"):
                conversion_steps(conversions, both, sizes, (8, 8), "x")
        else:
            assert [s.axis for s in conversion_steps(conversions, both, sizes, (8, 8), "x")] == [axis]
    gathers = conversion_steps({a: Conversion(S(0), R) for a in sizes}, both, sizes, (8, 8), "x")
    assert [s.axis for s in gathers] == ["tp", "cp"]


def test_the_list_is_long_and_covers_every_model_and_world() -> None:
    assert len(set(CASES)) == len(CASES) >= 60
    assert {case.model for case in CASES} == set(NAMES)
    assert {case.world for case in CASES} == {2, 4, 8}
    assert all(Mesh(**case.sizes).devices == case.world for case in CASES)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """Any model on any mesh of 2, 4 or 8 processes, with any schedule that goes with it."""
    axes = draw(st.lists(st.sampled_from(("pp", "dp_replicate", "dp_shard", "cp", "tp")), min_size=1, max_size=3))
    sizes = {axis: 2 ** axes.count(axis) for axis in sorted(set(axes))}
    shards = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    micro_batches = draw(st.sampled_from([n for n in (2, 4) if n * shards <= GLOBAL_BATCH] or [1]))
    pp = sizes.get("pp", 1)
    model = draw(st.sampled_from(NAMES))
    schedules = ["1f1b", "gpipe", *(LOOPED[:1] if pp == 2 and micro_batches == 4 else ())]
    if len(schedules) == 3 and model != "seq2seq":  # whose stages take several inputs
        schedules += LOOPED[1:] + V_SHAPED
    return Case(
        model=model,
        mesh=" ".join(f"{axis}={size}" for axis, size in sizes.items()),
        layout_seed=draw(st.integers(0, 2**16)),
        micro_batches=micro_batches,
        schedule=draw(st.sampled_from(schedules if micro_batches >= pp else ["gpipe"])),
        recompute=draw(st.sampled_from(("none", "full"))),
        precision=draw(st.sampled_from(("fp32", "fp32", "bf16"))),
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=drawn_cases())
def test_drawn_plans_equal_one_process(groups: Groups, case: Case) -> None:
    groups.run(case)
