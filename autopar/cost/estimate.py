"""Estimate: what a plan is predicted to take, in time and memory, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.block import BlockCost
from autopar.cost.engine import Engine
from autopar.cost.memory import (
    FP32,
    Part,
    StageMemory,
    counts_at_peak,
    expert_parameters,
    local_parameters,
    rank_memory,
    saved_per_micro_batch,
)
from autopar.cost.schedules import actions, stages_of_rank
from autopar.cost.streams import backward_pass, forward_pass
from autopar.cost.timeline import StageTime, Timeline, play
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.plan import Plan
from autopar.sharding.resolve import check_blocks
from autopar.units import GIB

ADAMW_TRAFFIC = 7  # fp32 values read and written per parameter: p, g, m, v in; p, m, v out
INTRA = ("cp", "tp", "ep")


@dataclass(frozen=True)
class Estimate:
    """A prediction for one optimizer step.

    Attributes:
        step_time_s: of the step; ``breakdown`` is how the busiest stage spends it and adds up to it.
        forward_flops, backward_flops: of the model over the global batch, recomputation apart.
        stages: memory of one device of each pipeline rank.
        stage_times: of each stage of the chain.
        held: of each pipeline rank, its stages of the chain.
        timeline: the played schedule.
        memory_limit: bytes that one device may take.
    """

    step_time_s: float
    breakdown: dict[str, float]
    flops: float
    peak_flops: float
    tokens: int
    devices: int
    mesh: dict[str, int]
    stages: tuple[StageMemory, ...]
    stage_times: tuple[StageTime, ...]
    held: tuple[tuple[int, ...], ...]
    timeline: Timeline
    memory_limit: int

    @property
    def peak_reserved(self) -> int:
        """Bytes of the worst device."""
        return max(stage.reserved for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the worst device stays within the cluster's limit."""
        return self.peak_reserved <= self.memory_limit

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model FLOPs per device and second over the peak rate (Chowdhery et al. 2022)."""
        return self.flops / self.devices / self.step_time_s / self.peak_flops

    def to_json(self) -> dict[str, Any]:
        """The documented keys of ``estimate --json``."""
        exposed = sum(self.breakdown[k] for k in ("tp", "dp", "cp", "ep", "pp"))
        return {
            "step_time_s": self.step_time_s,
            "tokens_per_s_per_device": self.tokens / self.step_time_s / self.devices,
            "tflops_per_device": self.flops / self.devices / self.step_time_s / 1e12,
            "mfu": self.mfu,
            "peak_allocated_gib": max(s.allocated for s in self.stages) / GIB,
            "peak_reserved_gib": self.peak_reserved / GIB,
            "memory_limit_gib": self.memory_limit / GIB,
            "fits": self.fits,
            "breakdown": {**self.breakdown, "exposed_communication": exposed},
            "stages": [self._rank_json(rank) for rank in range(len(self.stages))],
            "mesh": self.mesh,
            "optimality_gap": None,
            "search_time_s": None,
        }

    def _rank_json(self, rank: int) -> dict[str, Any]:
        memory, times = self.stages[rank], [self.stage_times[s] for s in self.held[rank]]
        return {
            "forward_s": sum(t.forward_s for t in times),
            "backward_s": sum(t.backward_s for t in times),
            "peak_allocated_gib": memory.allocated / GIB,
            "peak_reserved_gib": memory.reserved / GIB,
            "memory_gib": {k: v / GIB for k, v in vars(memory).items() if k != "allocator_fraction"},
        }


def estimate(job: TrainingJob, plan: Plan, cluster: Cluster) -> Estimate:
    """Predicts a plan for a job on a cluster.

    Raises:
        PlanError: the plan was made for another model or another number of devices, or is impossible.
    """
    return engine_for(job, plan, cluster).estimate(plan)


def engine_for(job: TrainingJob, plan: Plan, cluster: Cluster) -> Engine:
    """The engine that prices a plan for a job on a cluster.

    Raises:
        PlanError: the plan was made for another model, or needs more devices than the cluster has.
    """
    if plan.mesh.devices > cluster.devices:
        raise PlanError(
            f"the plan needs {plan.mesh.devices} devices, cluster {cluster.name!r} has {cluster.devices}",
            "Search a plan for this cluster, or name the cluster that the plan was made for",
        )
    engine = Engine(lambda batch: capture(job, batch, cluster.device.kind, plan.precision), cluster, plan.precision)
    plan.check_model(engine.graph(plan.micro_batch).fingerprint, job.source)
    return engine


def stage_parts(engine: Engine, plan: Plan) -> list[list[Part]]:
    """Per stage, its blocks, what the plan chose for each, and their costs."""
    graph = engine.graph(plan.micro_batch)
    index = {b.name: b for b in graph.blocks}
    return [
        [(index[b.name], b, engine.block_cost(graph, index[b.name], plan.layouts[b.layout], plan.mesh)) for b in stage]
        for stage in plan.stage_blocks()
    ]


def estimate_plan(engine: Engine, plan: Plan) -> Estimate:
    """Prices every stage, plays the schedule, adds what happens once per step."""
    graph = engine.graph(plan.micro_batch)
    check_blocks(graph, plan)
    parts = stage_parts(engine, plan)
    _check_boundaries(plan, [part for stage in parts for part in stage])
    split = [_stage_split(engine, plan, stage) for stage in parts]
    times = tuple(
        StageTime(s["forward"], s["backward"], _send_time(engine, plan, graph, i), s["weight"])
        for i, s in enumerate(split)
    )
    played = play(plan.schedule, plan.mesh.pp, plan.virtual_stages, plan.micro_batches, times)
    tails = [_tail(engine, plan, stage, times[i].backward_s) for i, stage in enumerate(parts)]
    ranks = range(plan.mesh.pp)
    held = tuple(stages_of_rank(plan.schedule, rank, plan.mesh.pp, plan.virtual_stages) for rank in ranks)
    breakdown = _breakdown(plan, split, tails, times, played, held)
    queues = actions(plan.schedule, plan.mesh.pp, plan.virtual_stages, plan.micro_batches)
    kept = [saved_per_micro_batch(stage) for stage in parts]
    most = [counts_at_peak(queue, {i: kept[i] for i in stages}) for queue, stages in zip(queues, held, strict=True)]
    loads = [[(parts[i], most[rank][i]) for i in stages] for rank, stages in enumerate(held)]
    memory = tuple(rank_memory(plan, stages, engine.cluster.device, engine.trainer) for stages in loads)
    samples = plan.global_batch
    return Estimate(
        step_time_s=sum(breakdown.values()),
        breakdown=breakdown,
        flops=(graph.forward_flops + graph.backward_flops) / graph.batch_size * samples,
        peak_flops=engine.cluster.device.peak(plan.precision),
        tokens=samples * graph.tokens_per_sample,
        devices=plan.mesh.devices,
        mesh=plan.mesh.model_dump(),
        stages=memory,
        stage_times=times,
        held=held,
        timeline=played,
        memory_limit=engine.cluster.memory_limit_bytes,
    )


def _check_boundaries(plan: Plan, parts: list[Part]) -> None:
    """Neighbours must agree on the placement of what crosses between them."""
    crossing: dict[str, dict[str, str]] = {}
    for block, chosen, _ in parts:
        layout = plan.layouts[chosen.layout]
        for i, name in enumerate(block.inputs):
            placed = layout.inputs[i] if layout.inputs else {}
            expected = crossing.get(name, placed)
            if _explicit(expected) != _explicit(placed):
                raise PlanError(
                    f"block {block.name!r} expects {name} as {placed or 'R'}, the block that makes it gives "
                    f"{expected or 'R'}",
                    "Give both the same placement",
                )
        for i, name in enumerate(block.outputs):
            crossing[name] = layout.outputs[i] if layout.outputs else {}


def _explicit(placed: dict[str, str]) -> dict[str, str]:
    return {axis: p for axis, p in placed.items() if p != "R"}


def _stage_split(engine: Engine, plan: Plan, parts: list[Part]) -> dict[str, float]:
    """Seconds of one micro-batch in one stage: forward, backward, and both together by component.

    Every component is what it adds to the time: overlapped communication counts only where it is waited for.
    """
    split = {"forward": 0.0, "backward": 0.0, "compute": 0.0, "dp": 0.0, **dict.fromkeys(INTRA, 0.0)}
    split["weight"] = sum(cost.weight_s for _, _, cost in parts)
    forward, backward = [], []
    for _, chosen, cost in parts:
        wire = _exposed(engine, cost)
        ahead = sum(seconds for (_, way), seconds in wire.items() if way == "forward")
        back = sum(seconds for (_, way), seconds in wire.items() if way == "backward")
        full = chosen.recompute == "full"
        remade = cost.replay_s if full else cost.recompute_s if chosen.recompute == "selective" else 0.0
        forward.append(cost.forward_s + ahead)
        hidden = engine.trainer.tp_hidden if "tp" in engine.trainer.overlap else 0.0
        resent = (
            {a: s * (1 - hidden if a == "tp" else 1.0) for a, s in cost.replay_communication_s.items()} if full else {}
        )
        backward.append(cost.backward_s + remade + back + sum(resent.values()))
        split["compute"] += cost.forward_s + cost.backward_s + remade
        for (axis, way), seconds in wire.items():
            split[axis] += seconds + (resent.get(axis, 0.0) if way == "forward" else 0.0)
    split["forward"], split["backward"] = sum(forward), sum(backward)
    if plan.zero_stage == 3 and plan.mesh.dp_shard > 1:
        _unit_streams(engine, plan, parts, forward, backward, split)
    add = _accumulate_time(engine, plan, parts)
    for key in ("backward", "weight", "compute"):
        split[key] += add
    return split


def _exposed(engine: Engine, cost: BlockCost) -> dict[tuple[str, str], float]:
    """Seconds of a block's collectives that compute waits for."""
    hidden = engine.trainer.tp_hidden if "tp" in engine.trainer.overlap else 0.0
    return {key: s * (1 - hidden if key[0] == "tp" else 1.0) for key, s in cost.communication_s.items()}


def _unit_streams(
    engine: Engine,
    plan: Plan,
    parts: list[Part],
    forward: list[float],
    backward: list[float],
    split: dict[str, float],
) -> None:
    """Adds what FSDP's gathers and gradient sums cost one micro-batch, overlapped where the trainer does so."""
    trainer = engine.trainer
    gather = [_unit_time(engine, plan, cost, "all_gather", trainer.gather_bytes) for _, _, cost in parts]
    if "fsdp" not in trainer.overlap:
        split["forward"] += sum(gather)
        split["backward"] += sum(gather)
        split["dp"] += 2 * sum(gather)
        return
    reduce = [_unit_time(engine, plan, cost, "reduce_scatter", trainer.reduce_bytes) for _, _, cost in parts]
    slow_f, slow_b = sum(gather) * trainer.interference, sum(gather + reduce) * trainer.interference
    ahead = forward_pass(forward, gather) + slow_f
    back = backward_pass(backward[::-1], gather[::-1], reduce[::-1]) + slow_b
    split["dp"] += ahead - split["forward"] + back - split["backward"]
    split["forward"], split["backward"] = ahead, back


def _unit_time(engine: Engine, plan: Plan, cost: BlockCost, kind: str, item: int) -> float:
    """FSDP: one collective over one block's parameters, and the copies around it."""
    nbytes = sum(cost.parameter_elements) * item
    if not nbytes:
        return 0.0
    axis = "dp_cp" if engine.trainer.local_sequence and plan.mesh.dp_replicate == 1 else "dp_shard"
    wire = engine.communication.collective_time(kind, nbytes, engine.group(plan.mesh, axis))
    return wire + engine.compute.memory_time(2 * nbytes, "copy")


def _accumulate_time(engine: Engine, plan: Plan, parts: list[Part]) -> float:
    """Adding gradients of all micro-batches but the first, spread over all of them."""
    if engine.trainer.accumulates:  # the products that make the gradients add them up
        return 0.0
    if "fsdp" in engine.trainer.overlap and plan.zero_stage == 3:
        nbytes = 3 * sum(local_parameters(parts).values()) * FP32 / plan.mesh.dp_shard
        return nbytes / engine.cluster.device.bandwidth()
    nbytes = sum(local_parameters(parts).values()) * FP32
    rate = engine.cluster.overheads.accumulate_s_per_byte
    once = nbytes * rate if rate is not None else 3 * nbytes / engine.cluster.device.bandwidth()
    return once * (plan.micro_batches - 1) / plan.micro_batches


def _send_time(engine: Engine, plan: Plan, graph: OpGraph, stage: int) -> float:
    """Seconds to send what crosses the boundary after a stage; skips that pass through are sent again."""
    stages = plan.stage_blocks()
    if stage == len(stages) - 1:
        return 0.0
    before = {b.name for group in stages[: stage + 1] for b in group}
    layouts = {b.name: plan.layouts[b.layout] for b in plan.blocks}
    made: dict[str, int] = {}
    crossing: dict[str, int] = {}
    for block in graph.blocks:
        if block.name in before:
            cost = engine.block_cost(graph, block, layouts[block.name], plan.mesh)
            made.update(zip(block.outputs, cost.output_bytes, strict=True))
        else:
            crossing.update({name: made[name] for name in block.inputs if name in made})
    group = engine.group(plan.mesh, "pp")
    if engine.trainer.scatter_sends and plan.mesh.tp > 1:
        return _scattered_send(engine, plan, sum(crossing.values()), sharded=_is_sharded(plan))
    return sum(engine.communication.collective_time("send", nbytes, group) for nbytes in crossing.values())


def _is_sharded(plan: Plan) -> bool:
    """Whether activations cross between blocks cut over the tensor-parallel ranks."""
    return any(p.get("tp", "R") != "R" for layout in plan.layouts.values() for p in layout.outputs)


def _scattered_send(engine: Engine, plan: Plan, nbytes: int, sharded: bool) -> float:
    """Each tensor-parallel rank sends its part; a replicated activation is put together again within the node."""
    comm, mesh = engine.communication, plan.mesh
    if sharded:
        return comm.collective_time("send", nbytes, engine.group(mesh, "pp"))
    part = comm.collective_time("send", nbytes / mesh.tp, engine.group(mesh, "pp"))
    return part + comm.collective_time("all_gather", nbytes, engine.group(mesh, "tp"))


def _tail(engine: Engine, plan: Plan, parts: list[Part], last_backward_s: float) -> dict[str, float]:
    """Seconds of what a stage does once per step: gradient sums, their norm, the optimizer.

    Args:
        last_backward_s: backward of one micro-batch, which overlapped gradient sums run beside.
    """
    parameters = local_parameters(parts)
    elements = sum(parameters.values())
    nbytes = elements * FP32
    mesh, comm, trainer = plan.mesh, engine.communication, engine.trainer
    dp, held = 0.0, float(nbytes)
    if plan.zero_stage == 3 and mesh.dp_shard > 1:
        held = nbytes / engine.group(mesh, "dp_cp" if trainer.local_sequence else "dp_shard").size
        if "fsdp" not in trainer.overlap:
            dp += sum(_unit_time(engine, plan, cost, "reduce_scatter", FP32) for _, _, cost in parts)
        if mesh.dp_replicate > 1:
            dp += comm.collective_time("all_reduce", held, engine.group(mesh, "dp_replicate"))
    elif plan.zero_stage in (1, 2) and engine.group(mesh, "dp_cp" if trainer.local_sequence else "dp").size > 1:
        dp, held = _sharded_update(engine, plan, parts, last_backward_s)
    elif mesh.dp > 1:
        dp += _bucketed(engine, elements * trainer.reduce_bytes, plan, "dp_cp" if trainer.local_sequence else "dp")
    reductions: dict[str, int] = {}
    for _, _, cost in parts:
        for axis, size in cost.step_reduction_bytes.items():
            reductions[axis] = reductions.get(axis, 0) + size
    intra = {axis: _bucketed(engine, size, plan, axis) for axis, size in reductions.items()}
    scalars = 2 * comm.collective_time("all_reduce", 8, engine.group(mesh, "world")) if mesh.devices > 1 else 0.0
    overheads = engine.cluster.overheads
    if overheads.optimizer_s_per_byte is not None:
        optimizer = held * overheads.optimizer_s_per_byte + len(parameters) * (overheads.optimizer_s_per_tensor or 0.0)
    else:
        traffic = trainer.optimizer_traffic_bytes / FP32 * held
        optimizer = engine.compute.memory_time(traffic, "optimizer")
    norm = engine.compute.memory_time(held, "reduction")
    norm += elements * trainer.gradient_traffic_bytes / engine.cluster.device.bandwidth()
    return {"dp": dp + scalars, "optimizer": optimizer + norm + trainer.step_overhead_s, **intra}


def _sharded_update(engine: Engine, plan: Plan, parts: list[Part], last_backward_s: float) -> tuple[float, float]:
    """ZeRO 1 and 2: gradients reduce-scattered, updated parameters gathered (Rajbhandari et al. 2020, section 5).

    Returns:
        Seconds that are waited for, and fp32 bytes of the parameters that this device updates.
    """
    mesh, comm, trainer = plan.mesh, engine.communication, engine.trainer
    experts = sum(expert_parameters(parts).values()) if mesh.ep > 1 else 0
    dense = sum(local_parameters(parts).values()) - experts
    total = held = 0.0
    for elements, axis in ((dense, "dp_cp"), (experts, "edp")):
        group = engine.group(mesh, axis)
        total += comm.collective_time("reduce_scatter", elements * trainer.reduce_bytes, group)
        total += comm.collective_time("all_gather", elements * trainer.gather_bytes, group)
        held += elements * FP32 / group.size
    if "dp" in trainer.overlap:
        return total * trainer.interference + max(0.0, total - 1.5 * last_backward_s), held
    return total, held


def _bucketed(engine: Engine, nbytes: int, plan: Plan, axis: str) -> float:
    """All-reduce in flat buckets, with the copies into and out of them."""
    bucket = plan.gradient_reduction.bucket_mib * 2**20
    group = engine.group(plan.mesh, axis)
    if not engine.trainer.packs:  # gradients lie in one buffer already
        return engine.communication.collective_time("all_reduce", nbytes, group)
    count, rest = divmod(nbytes, bucket)
    time = count * engine.communication.collective_time("all_reduce", bucket, group)
    time += engine.communication.collective_time("all_reduce", rest, group)
    return time + (engine.compute.memory_time(4 * nbytes, "copy") if nbytes else 0.0)


def _breakdown(
    plan: Plan,
    split: list[dict[str, float]],
    tails: list[dict[str, float]],
    times: tuple[StageTime, ...],
    played: Timeline,
    held: tuple[tuple[int, ...], ...],
) -> dict[str, float]:
    """The step of the busiest rank by component; sums to the step time."""
    ranks = plan.mesh.pp
    tail = [{k: sum(tails[s].get(k, 0.0) for s in held[r]) for k in ("dp", "optimizer", *INTRA)} for r in range(ranks)]
    slowest_tail = max(range(ranks), key=lambda r: sum(tail[r].values()))
    busiest = max(range(ranks), key=lambda r: played.busy_s[r])
    count = plan.micro_batches
    result = {key: count * sum(split[s][key] for s in held[busiest]) for key in ("compute", "dp", *INTRA)}
    for key in ("dp", *INTRA):
        result[key] += tail[slowest_tail][key]
    free = tuple(replace(t, send_s=0.0) for t in times)
    ideal = play(plan.schedule, ranks, plan.virtual_stages, count, free).makespan_s if ranks > 1 else played.makespan_s
    result["pp"] = max(0.0, played.makespan_s - ideal)
    result["bubble"] = max(0.0, ideal - played.busy_s[busiest])
    result["optimizer"] = tail[slowest_tail]["optimizer"]
    return {k: result[k] for k in ("compute", "tp", "dp", "cp", "ep", "pp", "bubble", "optimizer")}
