"""Estimate: what a plan is predicted to take, in time and memory, and where it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.cost.block import BlockCost
from autopar.cost.engine import Engine
from autopar.cost.memory import FP32, Part, StageMemory, local_parameters, rank_memory
from autopar.cost.timeline import StageTime, Timeline, play
from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.plan import Plan
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
        stage_times: of each stage of the chain; stage ``s`` is on pipeline rank ``s % pp``.
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
        memory, times = self.stages[rank], self.stage_times[rank :: len(self.stages)]
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
    if plan.mesh.devices > cluster.devices:
        raise PlanError(
            f"the plan needs {plan.mesh.devices} devices, cluster {cluster.name!r} has {cluster.devices}",
            "Search a plan for this cluster",
        )
    engine = Engine(lambda batch: capture(job, batch), cluster, plan.precision)
    found = engine.graph(plan.micro_batch).fingerprint
    if found != plan.model.fingerprint:
        raise PlanError(
            f"the plan was made for a model with fingerprint {plan.model.fingerprint}, {job.source} has {found}",
            "Search again for this model",
        )
    return engine.estimate(plan)


def estimate_plan(engine: Engine, plan: Plan) -> Estimate:
    """Prices every stage, plays the schedule, adds what happens once per step."""
    graph = engine.graph(plan.micro_batch)
    _check_blocks(graph, plan)
    index = {b.name: b for b in graph.blocks}
    parts: list[list[Part]] = [
        [(index[b.name], b, engine.block_cost(graph, index[b.name], plan.layouts[b.layout], plan.mesh)) for b in stage]
        for stage in plan.stage_blocks()
    ]
    _check_boundaries(plan, [part for stage in parts for part in stage])
    split = [_stage_split(engine, plan, stage) for stage in parts]
    times = tuple(
        StageTime(s["forward"], s["backward"], _send_time(engine, plan, graph, i)) for i, s in enumerate(split)
    )
    played = play(plan.schedule, plan.mesh.pp, plan.virtual_stages, plan.micro_batches, times)
    tails = [_tail(engine, plan, stage) for stage in parts]
    breakdown = _breakdown(plan, split, tails, times, played)
    ranks = plan.mesh.pp
    held = [[(parts[i], played.in_flight[i]) for i in range(rank, len(parts), ranks)] for rank in range(ranks)]
    memory = tuple(rank_memory(plan, stages, engine.cluster.device) for stages in held)
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
        timeline=played,
        memory_limit=engine.cluster.memory_limit_bytes,
    )


def _check_blocks(graph: OpGraph, plan: Plan) -> None:
    have, want = [b.name for b in graph.blocks], [b.name for b in plan.blocks]
    if have != want:
        odd = next((n for n in want if n not in have), next((n for n in have if n not in want), "their order"))
        raise PlanError(f"the plan's blocks are not the model's: {odd!r}", "Search again for this model")


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
    """Seconds of one micro-batch in one stage: forward, backward, and both together by component."""
    split = {"forward": 0.0, "backward": 0.0, "compute": 0.0, "dp": 0.0, **dict.fromkeys(INTRA, 0.0)}
    for _, chosen, cost in parts:
        gather = _unshard_time(engine, plan, cost)
        again = chosen.recompute == "full"
        forward = cost.forward_s + cost.communication("forward") + gather
        backward = cost.backward_s + cost.communication("backward") + gather
        backward += cost.forward_s + cost.communication("forward") if again else 0.0
        split["forward"] += forward
        split["backward"] += backward
        split["compute"] += cost.forward_s * (2 if again else 1) + cost.backward_s
        split["dp"] += 2 * gather
        for (axis, direction), seconds in cost.communication_s.items():
            split[axis] += seconds * (2 if again and direction == "forward" else 1)
    add = _accumulate_time(engine, plan, parts)
    split["backward"] += add
    split["compute"] += add
    return split


def _unshard_time(engine: Engine, plan: Plan, cost: BlockCost) -> float:
    """FSDP: all-gather of one block's parameters before its forward, and again before its backward."""
    if plan.zero_stage != 3 or plan.mesh.dp_shard == 1:
        return 0.0
    nbytes = sum(cost.parameter_elements) * FP32
    group = engine.group(plan.mesh, "dp_shard")
    copies = engine.compute.memory_time(2 * nbytes, "copy") if nbytes else 0.0
    return engine.communication.collective_time("all_gather", nbytes, group) + copies


def _accumulate_time(engine: Engine, plan: Plan, parts: list[Part]) -> float:
    """Adding gradients of all micro-batches but the first, spread over all of them."""
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
    return sum(engine.communication.collective_time("send", nbytes, group) for nbytes in crossing.values())


def _tail(engine: Engine, plan: Plan, parts: list[Part]) -> dict[str, float]:
    """Seconds of what a stage does once per step: gradient sums, their norm, the optimizer."""
    parameters = local_parameters(parts)
    nbytes = sum(parameters.values()) * FP32
    mesh, comm = plan.mesh, engine.communication
    dp, held = 0.0, float(nbytes)
    if plan.zero_stage == 3 and mesh.dp_shard > 1:
        held = nbytes / mesh.dp_shard
        for _, _, cost in parts:
            size = sum(cost.parameter_elements) * FP32
            dp += comm.collective_time("reduce_scatter", size, engine.group(mesh, "dp_shard"))
            dp += engine.compute.memory_time(2 * size, "copy") if size else 0.0
        if mesh.dp_replicate > 1:
            dp += comm.collective_time("all_reduce", held, engine.group(mesh, "dp_replicate"))
    elif mesh.dp > 1:
        dp += _bucketed(engine, nbytes, plan, "dp")
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
        optimizer = engine.compute.memory_time(ADAMW_TRAFFIC * held, "optimizer")
    norm = engine.compute.memory_time(held, "reduction")
    return {"dp": dp + scalars, "optimizer": optimizer + norm, **intra}


def _bucketed(engine: Engine, nbytes: int, plan: Plan, axis: str) -> float:
    """All-reduce in flat buckets, with the copies into and out of them."""
    bucket = plan.gradient_reduction.bucket_mib * 2**20
    group = engine.group(plan.mesh, axis)
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
) -> dict[str, float]:
    """The step of the busiest rank by component; sums to the step time."""
    ranks = plan.mesh.pp
    held = [range(rank, len(times), ranks) for rank in range(ranks)]
    tail = [{k: sum(tails[s].get(k, 0.0) for s in held[r]) for k in ("dp", "optimizer", *INTRA)} for r in range(ranks)]
    slowest_tail = max(range(ranks), key=lambda r: sum(tail[r].values()))
    busiest = max(range(ranks), key=lambda r: played.busy_s[r])
    count = plan.micro_batches
    result = {key: count * sum(split[s][key] for s in held[busiest]) for key in ("compute", "dp", *INTRA)}
    for key in ("dp", *INTRA):
        result[key] += tail[slowest_tail][key]
    free = tuple(StageTime(t.forward_s, t.backward_s) for t in times)
    ideal = play(plan.schedule, ranks, plan.virtual_stages, count, free).makespan_s if ranks > 1 else played.makespan_s
    result["pp"] = max(0.0, played.makespan_s - ideal)
    result["bubble"] = max(0.0, ideal - played.busy_s[busiest])
    result["optimizer"] = tail[slowest_tail]["optimizer"]
    return {k: result[k] for k in ("compute", "tp", "dp", "cp", "ep", "pp", "bubble", "optimizer")}
