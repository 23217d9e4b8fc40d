"""What must hold of the estimate of any plan."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.engine import Engine
from autopar.cost.estimate import estimate
from autopar.cost.operators import work_of
from autopar.cost.schedules import stages_of_rank
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.graph import TensorMeta
from autopar.plan import Layout, Mesh, Plan
from autopar.sharding.placement import local_shape
from autopar.sharding.rules import strategies
from autopar.units import GIB
from tests.cost.plans import MESHES, drawn_plan, engine, gpt, gpt_at

seeds = st.integers(0, 10**6).map(Random)
some_plan = st.builds(
    drawn_plan, st.sampled_from(MESHES), seeds, st.sampled_from([1, 2, 4]), st.sampled_from([2, 4, 6])
)
clusters = st.sampled_from(["dgx-h100-8", "l40s-8", "local-cpu-4"])
few = settings(max_examples=60, deadline=None)


@given(some_plan, clusters)
@few
def test_breakdown_sums_to_the_step(plan: Plan, cluster: str) -> None:
    found = engine(cluster).estimate(plan).to_json()
    parts = {k: v for k, v in found["breakdown"].items() if k != "exposed_communication"}
    assert all(v >= 0 for v in parts.values())
    assert sum(parts.values()) == pytest.approx(found["step_time_s"])
    exposed = sum(parts[k] for k in ("tp", "dp", "cp", "ep", "pp"))
    assert found["breakdown"]["exposed_communication"] == pytest.approx(exposed)
    samples = found["tokens_per_s_per_device"] * plan.mesh.devices * found["step_time_s"] / gpt_at(1).tokens_per_sample
    assert samples == pytest.approx(plan.global_batch)
    assert found["tflops_per_device"] * 1e12 == pytest.approx(
        found["mfu"] * engine(cluster).cluster.device.peak(plan.precision)
    )


@given(some_plan)
@few
def test_the_same_plan_gives_the_same_numbers(plan: Plan) -> None:
    fresh = Engine(gpt_at, Cluster.load("dgx-h100-8"))
    assert fresh.estimate(plan).to_json() == engine().estimate(plan).to_json()


@given(some_plan, clusters)
@few
def test_no_plan_beats_the_bound_of_its_mesh(plan: Plan, cluster: str) -> None:
    bound = engine(cluster).lower_bound(plan.mesh, plan.micro_batch, plan.micro_batches)
    assert 0 < bound <= engine(cluster).estimate(plan).step_time_s


def test_bounds_of_meshes_with_equal_products_are_apart() -> None:
    """A bound is that of its own axes, whatever was asked before."""
    meshes = [Mesh(tp=4), Mesh(cp=2, tp=2), Mesh(cp=4)]
    apart = [Engine(gpt_at, Cluster.load("dgx-h100-8")).lower_bound(mesh, 2, 4) for mesh in meshes]
    together = Engine(gpt_at, Cluster.load("dgx-h100-8"))
    assert [together.lower_bound(mesh, 2, 4) for mesh in meshes] == apart


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    links = tuple(replace(link, bandwidth=link.bandwidth * factor) for link in cluster.links)
    return replace(cluster, links=links, collectives=())


@given(some_plan, clusters, st.floats(1, 100))
@few
def test_more_bandwidth_is_never_slower(plan: Plan, name: str, factor: float) -> None:
    cluster = with_bandwidth(Cluster.load(name), 1.0)
    slow = Engine(gpt_at, cluster).estimate(plan)
    fast = Engine(gpt_at, with_bandwidth(cluster, factor)).estimate(plan)
    assert fast.step_time_s <= slow.step_time_s * (1 + 1e-9)
    assert [s.reserved for s in fast.stages] == [s.reserved for s in slow.stages]


@given(some_plan, st.floats(1, 10))
@few
def test_a_faster_device_is_never_slower(plan: Plan, factor: float) -> None:
    cluster = Cluster.load("dgx-h100-8")
    peaks = {k: v * factor for k, v in cluster.device.peak_flops.items()}
    quick = replace(cluster.device, peak_flops=peaks, memory_bandwidth=cluster.device.memory_bandwidth * factor)
    faster = replace(cluster, groups=tuple(replace(g, device=quick) for g in cluster.groups))
    assert Engine(gpt_at, faster).estimate(plan).step_time_s <= engine().estimate(plan).step_time_s * (1 + 1e-9)


@given(some_plan)
@few
def test_recomputing_takes_longer_and_keeps_less(plan: Plan) -> None:
    keep = engine().estimate(_all_blocks(plan, "none"))
    again = engine().estimate(_all_blocks(plan, "full"))
    assert again.step_time_s > keep.step_time_s
    for a, k, blocks in zip(again.stages, keep.stages, plan.stage_blocks(), strict=True):
        assert a.activations <= k.activations
        assert a.activations < k.activations or [b.name for b in blocks] == ["embed"]
    assert [s.parameters for s in again.stages] == [s.parameters for s in keep.stages]
    assert again.flops == keep.flops


def _all_blocks(plan: Plan, recompute: str) -> Plan:
    blocks = [b.model_copy(update={"recompute": recompute}) for b in plan.blocks]
    return plan.model_copy(update={"blocks": blocks})


def test_identical_blocks_are_priced_once() -> None:
    graph, priced = gpt_at(2), engine()
    for blocks in graph.block_kinds().values():
        costs = [priced.block_cost(graph, b, Layout(), Mesh()) for b in blocks]
        assert all(cost is costs[0] for cost in costs)
    fresh = [Engine(gpt_at, priced.cluster).block_cost(graph, b, Layout(), Mesh()) for b in graph.blocks[1:-1]]
    assert all(cost == fresh[0] for cost in fresh)


@pytest.mark.parametrize("size", [2, 4])
def test_sharding_conserves_flops(size: int) -> None:
    """Devices together do what one did, unless they all do the same."""
    graph = gpt_at(4)
    seen = 0
    for node in graph.of_kind("op"):
        for strategy in strategies(graph, node, size):
            if not node.forward_flops or strategy.is_replicated:
                continue
            metas = [graph.nodes[i].meta for i in node.inputs]
            ins = [
                TensorMeta(local_shape(m.shape, [(p, size)]), m.dtype)
                for m, p in zip(metas, strategy.inputs, strict=True)
            ]
            outs = [TensorMeta(local_shape(m.shape, [(strategy.output, size)]), m.dtype) for m in node.outputs]
            forward = work_of(node.op, ins, outs, node.forward_flops / size, "forward")
            backward = work_of(node.op, ins, outs, node.backward_flops / size, "backward")
            assert forward.flops * size == node.forward_flops
            if forward.products:
                assert backward.flops * size == node.backward_flops
            seen += 1
    assert seen > 20


@given(some_plan)
@few
def test_pipeline_holds_what_its_schedule_holds(plan: Plan) -> None:
    pp, count = plan.mesh.pp, plan.micro_batches
    if pp == 1:
        return
    wants = {"gpipe": [count] * pp, "1f1b": [min(count, pp - s) for s in range(pp)]}
    for schedule, held in wants.items():
        found = engine().estimate(plan.model_copy(update={"schedule": schedule}))
        assert list(found.timeline.in_flight) == held
    one = plan.model_copy(update={"schedule": "gpipe", "micro_batches": 1, "global_batch": plan.global_batch // count})
    all_at_once, single = (engine().estimate(p) for p in (plan.model_copy(update={"schedule": "gpipe"}), one))
    assert [s.activations for s in all_at_once.stages] == [count * s.activations for s in single.stages]


VIRTUAL = {"interleaved_1f1b": 3, "interleaved_zero_bubble": 2, "zbv": 2, "dualpipev": 2}


@given(seeds, st.sampled_from(sorted(VIRTUAL)))
@few
def test_virtual_stages_are_where_the_schedule_puts_them(random: Random, schedule: str) -> None:
    virtual = VIRTUAL[schedule]
    plan = drawn_plan(Mesh(pp=2), random, 2, 8, schedule=schedule, virtual_stages=virtual, recompute="none")
    found = engine().estimate(plan)
    graph = gpt_at(2)
    blocks = {b.name: b for b in graph.blocks}
    for rank, memory in enumerate(found.stages):
        stages = stages_of_rank(schedule, rank, 2, virtual)
        held = {p for s in stages for b in plan.stage_blocks()[s] for p in blocks[b.name].parameters}
        elements = sum(graph.nodes[p].meta.numel for p in held if graph.nodes[p].kind == "parameter")
        assert memory.parameters >= 4 * elements
        assert memory.parameters - 4 * elements < 4096  # buffers
        assert memory.gradients == 4 * elements
    times = found.to_json()["stages"]
    assert sum(t["forward_s"] for t in times) == pytest.approx(sum(t.forward_s for t in found.stage_times))
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
    assert all(0 < t.weight_s <= t.backward_s for t in found.stage_times)


def test_zero_three_divides_states() -> None:
    whole, cut = (
        engine().estimate(drawn_plan(mesh, Random(0), recompute="none")).stages[0]
        for mesh in (Mesh(dp_replicate=2), Mesh(dp_shard=2))
    )
    elements = sum(n.meta.numel for n in gpt_at(2).of_kind("parameter"))
    assert whole.gradients == 4 * elements
    assert whole.optimizer == 8 * elements
    assert cut.gradients * 2 == whole.gradients
    assert cut.optimizer * 2 == whole.optimizer
    assert cut.unsharded > 0
    assert whole.unsharded == 0


def test_one_device_keeps_what_autograd_keeps() -> None:
    """Activations of a plan for one device are the union of all operators' saved tensors, to the byte."""
    plan = drawn_plan(Mesh(), Random(0), 2, 4, recompute="none")
    graph = gpt_at(2)
    kept: dict[tuple[str, int], int] = {}
    for node in graph.nodes.values():
        for number, saved in enumerate(node.saved):
            key = (saved.source, saved.output) if saved.source else (f"{node.name}#", number)
            kept[key] = saved.meta.nbytes
    assert engine().estimate(plan).stages[0].activations == sum(kept.values())


def test_activations_are_what_torch_allocates() -> None:
    """Saved tensors of the real model's forward, counted by storage, less the parameters."""
    job, batch = gpt(), 2
    model = job.loss_module()
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    flat = job.flatten_batch(job.example_batch(batch))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(**flat)
    predicted = engine().estimate(drawn_plan(Mesh(), Random(0), batch, 4, recompute="none")).stages[0].activations
    assert predicted == pytest.approx(sum(storages.values()), rel=0.02)
    assert loss.requires_grad


@given(some_plan)
@few
def test_memory_is_the_sum_of_its_parts(plan: Plan) -> None:
    found = engine().estimate(plan)
    device = engine().cluster.device
    for memory, shown in zip(found.stages, found.to_json()["stages"], strict=True):
        parts = {k: v for k, v in vars(memory).items() if k not in ("context", "allocator_fraction")}
        assert all(v >= 0 for v in parts.values())
        assert sum(parts.values()) == memory.allocated
        assert memory.reserved >= memory.allocated + device.context_bytes
        assert sum(shown["memory_gib"].values()) * GIB == pytest.approx(memory.allocated + memory.context)
    assert found.peak_reserved == max(s.reserved for s in found.stages)


def test_fits_follows_the_limit() -> None:
    plan = drawn_plan(Mesh(tp=2), Random(0))
    found = engine().estimate(plan)
    assert found.fits
    tight = replace(
        engine().cluster,
        groups=tuple(
            replace(g, device=replace(g.device, memory_bytes=found.peak_reserved - 1)) for g in engine().cluster.groups
        ),
        memory_reserve_bytes=0,
    )
    assert not Engine(gpt_at, tight).estimate(plan).fits


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"fingerprint": "other"}, "fingerprint"), ({"mesh": Mesh(tp=8, pp=2)}, "16 devices")],
)
def test_foreign_plans_are_refused(changes: dict[str, Any], message: str) -> None:
    plan = drawn_plan(Mesh(tp=2), Random(0))
    model = plan.model.model_copy(update={"fingerprint": changes.get("fingerprint", plan.model.fingerprint)})
    plan = plan.model_copy(update={"model": model, "mesh": changes.get("mesh", plan.mesh)})
    with pytest.raises(PlanError, match=message):
        estimate(gpt(), plan, Cluster.load("dgx-h100-8"))


def test_all_devices_at_once_do_the_global_batch() -> None:
    found = engine().estimate(drawn_plan(Mesh(dp_replicate=2, tp=2), Random(1)))
    per_sample = (gpt_at(1).forward_flops + gpt_at(1).backward_flops) * math.prod((2, 4, 2))
    assert found.flops == pytest.approx(per_sample)
