"""parallelize: a job and a plan become this process's part of the training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import networkx as nx
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.errors import PlanError
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import Batch, TrainingJob
from autopar.plan import INTRA_AXES, Plan
from autopar.runtime.gradients import Trained, clip, global_norm, reduce_gradients, unscale
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.loss_weights import valid_label_counter
from autopar.runtime.monitor import StepClock
from autopar.runtime.parameters import as_whole, initial_weights, local_tensors
from autopar.runtime.pipeline import MULTI, check_schedule, make_schedule, stages_of_rank, weighted
from autopar.runtime.random import is_random, step_stream
from autopar.runtime.stage import AUTOCAST, BATCH, Stage, activation_dtypes, boundary_examples, build_stage
from autopar.runtime.statistics import average_over_data, running_statistics
from autopar.runtime.topology import Topology, build_topology
from autopar.sharding.placement import R
from autopar.sharding.resolve import ResolvedBlock, resolve_plan
from autopar.units import MIB


def parallelize(job: TrainingJob, plan: Plan) -> ParallelModel:
    """This process's part of the planned model.

    Call it in every process, after ``init_process_group`` (a single-process plan needs none).

    Raises:
        PlanError: the plan was made for another model, needs another number of processes, holds an impossible
            placement, or asks for a setting that cannot run.
    """
    check_runnable(plan)
    graph = capture(job, plan.micro_batch)
    plan.check_model(graph.fingerprint, job.source)
    check_schedule(graph, plan)
    resolved = resolve_plan(graph, plan)
    return ParallelModel(job, plan, graph, resolved, build_topology(plan))


def check_runnable(plan: Plan) -> None:
    """Refuses what this runtime cannot execute.

    Raises:
        PlanError: names the field and what works.
    """
    if plan.precision not in AUTOCAST:
        raise PlanError(f"precision {plan.precision!r} cannot run yet", f"Use one of {', '.join(AUTOCAST)}")
    if plan.zero_stage in (1, 2):
        raise PlanError(f"zero_stage {plan.zero_stage} cannot run yet", "Use 0 (replicated) or 3 (fully sharded)")
    if plan.zero_stage == 0 and plan.mesh.dp_shard > 1:
        raise PlanError("mesh.dp_shard is above 1 with zero_stage 0", "Use zero_stage 3, or dp_replicate")
    if plan.mesh.ep > 1:
        raise PlanError(f"mesh.ep = {plan.mesh.ep} cannot run yet", "Use ep = 1")
    if plan.offload != "none":
        raise PlanError(f"offload {plan.offload!r} cannot run yet", "Use none")
    for axis in ("dtype", "compression"):
        value = getattr(plan.gradient_reduction, axis)
        if value not in ("fp32", "none"):
            raise PlanError(f"gradient_reduction.{axis} {value!r} cannot run yet", "Use fp32")
    selective = next((b.name for b in plan.blocks if b.recompute == "selective"), None)
    if selective:
        raise PlanError(f"block {selective!r} has recompute 'selective', which cannot run yet", "Use none or full")


class ParallelModel:
    """This process's part of a model in training.

    Attributes:
        optimizer: the job's optimizer over this process's parameters.
        loss, grad_norm: of the last step, over the whole global batch; equal on every process.
        max_grad_norm: clip the global gradient norm to this, or None.
        stop_asked: set it on any process to stop the run; travels with the loss of the next step.
        stop_agreed: some process had asked before the last step; the same on every process.
        skipped: the last step's loss or gradient norm was not finite, so the optimizer left all weights as they were.
        loss_scale: the factor on the loss under fp16, else None.
        own_loss: this process's share of the last loss.
        times: seconds of the last step's parts: forward and backward, gradient reduction, optimizer.
        report: (work in seconds, peak memory in GiB) that this process tells the others with its next loss.
        reports: what each process told with the last loss.
        steps_done: optimizer steps so far; dropout masks follow from it, so set it when going on from a checkpoint.
    """

    def __init__(
        self, job: TrainingJob, plan: Plan, graph: OpGraph, resolved: dict[str, ResolvedBlock], topology: Topology
    ) -> None:
        self.job, self.plan, self.graph, self.topology = job, plan, graph, topology
        self.resolved = resolved
        self.max_grad_norm: float | None = None
        self.loss, self.grad_norm = float("nan"), float("nan")
        self.own_loss = float("nan")
        self.skipped = False
        self.loss_scale = LossScale() if plan.precision == "fp16" else None
        self.times: dict[str, float] = {}
        self.report = (0.0, 0.0)
        self.reports: list[tuple[float, float]] = [self.report]
        self.steps_done = 0
        self.stop_asked, self.stop_agreed = False, False
        self._random = any(is_random(graph, node) for node in graph.nodes.values())
        mine = stages_of_rank(plan.schedule, topology.rank("pp"), plan.mesh.pp, plan.virtual_stages)
        blocks = [resolved[b.name] for i in mine for b in plan.stage_blocks()[i]]
        self.sharded = plan.zero_stage == 3 and topology.sizes["dp_shard"] > 1
        self._placed = {graph.nodes[n].op: placed for b in blocks for n, placed in b.parameter_placements.items()}
        tensors = local_tensors(graph, blocks, topology, initial_weights(job, plan.seed), as_dtensors=self.sharded)
        self.stages = {i: build_stage(graph, plan, resolved, i, topology, tensors) for i in mine}
        if self.sharded:
            for stage in self.stages.values():
                # schedules that split the backward pass look the weights up unsharded, and unshard stages themselves
                _shard(stage, topology, reshard_after_forward=plan.schedule not in MULTI or plan.mesh.pp == 1)
        self.schedule = self._schedule() if plan.mesh.pp > 1 else None
        self._count = valid_label_counter(graph)
        running, _ = running_statistics(graph)
        self._statistics = [buffer for name, buffer in self.named_buffers() if name in running]
        self.twins = self._twins()
        self.trained = self._trained(blocks)
        self.optimizer = job.build_optimizer([one.parameter for one in self.trained])

    # --- the step ------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> torch.Tensor:
        """One optimizer step on a global batch, of which this process takes its own data shard.

        Returns:
            The mean loss over the global batch, a scalar, the same on every process.

        Raises:
            PlanError: the batch does not have the plan's global batch size or the captured shapes.
        """
        named = self.job.flatten_batch(batch)
        for key, value in named.items():
            if value.ndim == 0 or value.shape[0] != self.plan.global_batch:
                raise PlanError(
                    f"batch tensor {key!r} has shape {tuple(value.shape)}, the plan's global_batch is "
                    f"{self.plan.global_batch}",
                    "Give whole global batches, samples in dimension 0",
                )
        shards = self.plan.mesh.dp
        return self.step_shard({k: v.chunk(shards)[self.topology.data_shard] for k, v in named.items()})

    def step_shard(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
        """One optimizer step on this process's data shard alone (``global_batch / data shards`` samples by name)."""
        self._check(shard)
        self.optimizer.zero_grad(set_to_none=True)
        clock = StepClock()
        with step_stream(self.plan.seed, self.steps_done, self.topology) if self._random else nullcontext():
            loss = self.forward_backward(shard)
        clock.mark("forward_backward_s")
        self.reduce_gradients()
        clock.mark("reduction_s")
        self.skipped = not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))
        if not self.skipped:
            if self.max_grad_norm is not None:
                clip(self.trained, torch.tensor(self.grad_norm), self.max_grad_norm)
            self.optimizer.step()
            self.align_tied()
        if self.loss_scale is not None:
            self.loss_scale.update(self.skipped)
        average_over_data(self._statistics, self.topology, self.plan.gradient_reduction.bucket_mib * MIB)
        clock.mark("optimizer_s")
        self.times = clock.parts
        self.steps_done += 1
        return loss

    def forward_backward(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
        """Loss over the global batch; leaves this process's gradients, not yet summed over processes.

        Under fp16 they are those of the scaled loss.
        """
        shard = {k: v.to(self.topology.device) for k, v in shard.items()}
        scale = self.loss_scale.value if self.loss_scale else 1.0
        weights = self._weights(shard) * scale
        own = self._pipeline(shard, weights) if self.schedule else self._accumulate(shard, weights)
        own = own / scale
        self.own_loss = float(own)
        return self._share(own)

    def _share(self, own: torch.Tensor) -> torch.Tensor:
        """The loss over all processes; requests to stop and what each process reports travel with it."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        shared = torch.zeros(2 + 2 * world, device=own.device)
        if all(self.topology.rank(axis) == 0 for axis in ("cp", "tp")):  # the first of those with the same loss
            shared[0] = own
        shared[1] = float(self.stop_asked)
        shared[2 + 2 * rank], shared[3 + 2 * rank] = self.report
        if dist.is_initialized():
            dist.all_reduce(shared)
        self.loss, stop, *reports = shared.tolist()
        self.stop_agreed = stop > 0
        self.reports = list(zip(reports[::2], reports[1::2], strict=True))
        return shared[0]

    def reduce_gradients(self) -> None:
        """Sums gradients over processes and measures their norm."""
        for one, twin in self.twins:
            if twin.grad is not None:
                one.grad = twin.grad if one.grad is None else one.grad + twin.grad
                twin.grad = None
        data_axes = [] if self.sharded else self.topology.active("dp_replicate", "dp_shard")
        reduce_gradients(self.trained, self.topology, data_axes, self.plan.gradient_reduction.bucket_mib * MIB)
        if self.loss_scale is not None:
            unscale(self.trained, self.loss_scale.value)
        self.grad_norm = float(global_norm(self.trained))

    def _accumulate(self, shard: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        (stage,) = self.stages.values()
        count = self.plan.micro_batches
        pieces = {k: v.chunk(count) for k, v in shard.items()}
        total = torch.zeros((), device=self.topology.device)
        for i in range(count):
            if isinstance(stage, FSDPModule):
                stage.set_requires_gradient_sync(i == count - 1)
                stage.set_is_last_backward(i == count - 1)
            loss = weighted(stage(**{BATCH + k: v[i] for k, v in pieces.items()}), weights[i])
            loss.backward()
            total += loss.detach()
        return total

    def _pipeline(self, shard: dict[str, torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        named = {BATCH + key: value for key, value in shard.items()}
        assert self.schedule is not None
        holds_last = len(self.plan.stages) - 1 in self.stages
        if holds_last:
            self.schedule.step(target=weights, losses=losses, return_outputs=False, **named)
        else:
            self.schedule.step(**named)
        return (
            torch.stack([one.detach() for one in losses]).sum()
            if losses
            else torch.zeros((), device=self.topology.device)
        )

    def _weights(self, shard: dict[str, torch.Tensor]) -> torch.Tensor:
        """Each micro-batch's share of the global mean; shape ``[micro_batches]``."""
        count = self.plan.micro_batches
        if self._count is None:
            return torch.full((count,), 1 / (count * self.plan.mesh.dp), device=self.topology.device)
        pieces = {k: v.chunk(count) for k, v in shard.items()}
        valid = torch.stack([self._count({k: v[i] for k, v in pieces.items()}) for i in range(count)]).float()
        total = valid.sum()
        for axis in self.topology.active("dp_replicate", "dp_shard"):
            dist.all_reduce(total, group=self.topology.group(axis))
        return valid / total.clamp(min=1)

    def _check(self, shard: dict[str, torch.Tensor]) -> None:
        rows = self.plan.micro_batch * self.plan.micro_batches
        for node in self.graph.of_kind("input"):
            want = (rows, *node.meta.shape[1:])
            got = tuple(shard[node.op].shape) if node.op in shard else None
            if got != want:
                raise PlanError(
                    f"batch tensor {node.op!r} has shape {got} on this data shard, the plan was made for {want}",
                    "Keep shapes as in example_batch, or search again",
                )

    # --- parameters ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the names of the user's state_dict."""
        yield from {name: copies[0] for name, copies in self._copies_by_name().items()}.items()

    def _copies_by_name(self) -> dict[str, list[nn.Parameter]]:
        """Every parameter object by name; FSDP makes one for each of this process's stages that reads a tied one."""
        found: dict[str, list[nn.Parameter]] = {}
        for stage in self.stages.values():
            for block in stage.blocks:
                for name, parameter in block.named_parameters():
                    copies = found.setdefault(name.replace("_orig_mod.", ""), [])
                    if not any(parameter is copy for copy in copies):
                        copies.append(parameter)
        return found

    def _twins(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(copies[0], twin) for copies in self._copies_by_name().values() for twin in copies[1:]]

    def align_tied(self) -> None:
        """Gives second copies of tied parameters the values of the first."""
        with torch.no_grad():
            for one, twin in self.twins:
                twin.copy_(one)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's persistent buffers under the names of the user's state_dict."""
        kinds = {n.op for n in self.graph.of_kind("buffer")}
        for stage in self.stages.values():
            for block in stage.blocks:
                yield from ((n, b) for n, b in block.named_buffers() if n in kinds)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this process's stages; DTensors where they are shards of a whole."""
        parameters = {n: self.as_whole(n, p.detach()) for n, p in self.named_parameters()}
        return {**parameters, **{n: self.as_whole(n, b) for n, b in self.named_buffers()}}

    def as_whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor laid out as a parameter (the parameter, its optimizer state), seen as part of the whole one."""
        return tensor if isinstance(tensor, DTensor) else as_whole(tensor, self._placed.get(name, {}), self.topology)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's parameters and buffers, gathered on every process; for small models and exports."""
        whole = {n: (t.full_tensor() if isinstance(t, DTensor) else t).cpu() for n, t in self.state_dict().items()}
        if self.topology.sizes["pp"] > 1:
            parts: list[Any] = [None] * self.topology.sizes["pp"]
            dist.all_gather_object(parts, whole, group=self.topology.group("pp"))
            whole = {name: tensor for part in parts for name, tensor in part.items()}
        for name, others in self.graph.tied.items():
            whole.update(dict.fromkeys(others, whole[name]) if name in whole else {})
        return whole

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Loads whole tensors, or shards as :meth:`state_dict` gives them.

        Raises:
            PlanError: a name of this process is missing or has another shape.
        """
        for name, own in self.state_dict().items():
            given = state.get(name)
            if given is None or given.shape != own.shape:
                raise PlanError(
                    f"state_dict has {name!r} as {None if given is None else tuple(given.shape)}",
                    f"It must have shape {tuple(own.shape)}",
                )
            if isinstance(own, DTensor) and not isinstance(given, DTensor):
                given = distribute_tensor(given.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
            own.copy_(given)
        self.align_tied()

    # --- construction ---------------------------------------------------------------------------------------------

    def _schedule(self) -> Any:
        stages = []
        dtypes = activation_dtypes(self.graph, AUTOCAST[self.plan.precision], self.topology.device)
        for index, stage in self.stages.items():
            examples = [
                boundary_examples(self.graph, self.resolved, names, dtypes, self.topology.device)
                for names in (stage.receives, stage.sends)
            ]
            stages.append(
                PipelineStage(
                    stage,
                    index,
                    len(self.plan.stages),
                    self.topology.device,
                    input_args=examples[0],
                    output_args=examples[1],
                    group=self.topology.group("pp"),
                )
            )
        return make_schedule(self.plan.schedule, stages, self.plan.micro_batches)

    def _trained(self, blocks: list[ResolvedBlock]) -> list[Trained]:
        partial: dict[str, dict[str, None]] = {}
        for resolved in blocks:
            for node, axis in resolved.step_reductions:
                partial.setdefault(self.graph.nodes[node].op, {})[axis] = None
        ties = self._tied_groups()
        trained = []
        for name, parameter in self.named_parameters():
            if not parameter.requires_grad:
                continue
            holders, group = ties.get(name, (1, None))
            trained.append(Trained(name, parameter, tuple(partial.get(name, {})), self._copies(name) * holders, group))
        return trained

    def _copies(self, name: str) -> int:
        """Processes of one pipeline stage that hold the same elements."""
        count = self.topology.sizes["dp_replicate"] * (1 if self.sharded else self.topology.sizes["dp_shard"])
        for axis in INTRA_AXES:
            placed = self._placed.get(name, {}).get(axis, R)
            count *= 1 if placed.is_shard else self.topology.sizes.get(axis, 1)
        return count

    def _tied_groups(self) -> dict[str, tuple[int, dist.ProcessGroup | None]]:
        """For parameters that several stages hold: how many do, and the group of this process's copies."""
        if self.topology.sizes["pp"] == 1:
            return {}
        ranks = self.topology.sizes["pp"]
        owner = {}
        for rank in range(ranks):
            for i in stages_of_rank(self.plan.schedule, rank, ranks, self.plan.virtual_stages):
                owner[i] = rank
        holders: dict[str, dict[int, None]] = {}
        for i, blocks in enumerate(self.plan.stage_blocks()):
            for block in blocks:
                for node in self.resolved[block.name].block.parameters:
                    if self.graph.nodes[node].kind == "parameter":
                        holders.setdefault(self.graph.nodes[node].op, {})[owner[i]] = None
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        found: dict[str, tuple[int, dist.ProcessGroup | None]] = {}
        for name, where in holders.items():
            if len(where) > 1:
                key = tuple(sorted(where))
                if key not in groups:
                    groups[key] = self._pipeline_subgroup(key)
                if self.topology.rank("pp") in key:
                    found[name] = (len(key), groups[key])
        return found

    def _pipeline_subgroup(self, stages: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group over some ranks of this process's pipeline; every process takes part in making all."""
        mesh = self.topology.mesh
        assert mesh is not None
        names = mesh.mesh_dim_names or ()
        lines = mesh.mesh.movedim(names.index("pp"), -1).reshape(-1, self.topology.sizes["pp"])
        mine = None
        for line in lines.tolist():
            ranks = [line[i] for i in stages]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                mine = group
        return mine


def _shard(stage: Stage, topology: Topology, reshard_after_forward: bool) -> None:
    """FSDP2 on each block, then on the stage, summing gradients (the loss is already a share of the mean).

    Blocks that share a parameter are one unit: FSDP manages a parameter once, in every module that reads it.
    """
    mesh = topology.submesh("dp_replicate", "dp_shard")
    for unit in _units(stage):
        if any(True for block in unit for _ in block.parameters()):
            fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(stage, mesh=mesh, reshard_after_forward=reshard_after_forward)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


def _units(stage: Stage) -> list[list[nn.Module]]:
    """The blocks of a stage, those that share a parameter together."""
    sharing: nx.Graph[int] = nx.Graph()
    first: dict[int, int] = {}
    for i, block in enumerate(stage.blocks):
        sharing.add_node(i)
        for parameter in block.parameters():
            sharing.add_edge(i, first.setdefault(id(parameter), i))
    return [[stage.blocks[i] for i in sorted(unit)] for unit in nx.connected_components(sharing)]
