"""Memory of one pipeline stage on one device, by component.

What one element takes is the trainer's: autopar's own keeps parameters, gradients and AdamW's two states in fp32;
ZeRO-3 divides them over the shard axis (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.block import BlockCost
from autopar.cost.schedules import Action
from autopar.cost.trainer import AUTOPAR, Trainer
from autopar.hardware.device import Device
from autopar.model.graph import Block
from autopar.plan import BlockPlan, Plan
from autopar.units import MIB

FP32 = 4
OPTIMIZER_STATES = 2  # AdamW: first and second moment


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage on one device at the peak.

    Attributes:
        activations: kept for backward, over the micro-batches in flight.
        workspace: the largest operator's result and gradient; with recomputation, one block's activations.
        unsharded: whole parameters of FSDP units in flight.
        buffers: flat gradient buckets.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    unsharded: int
    buffers: int
    context: int
    allocator_fraction: float

    @property
    def allocated(self) -> int:
        """Bytes in tensors."""
        tensors = self.parameters + self.gradients + self.optimizer + self.activations
        return tensors + self.workspace + self.unsharded + self.buffers

    @property
    def reserved(self) -> int:
        """Bytes taken from the device: tensors, what the allocator holds beyond them, and the runtime's context."""
        return int(self.allocated * (1 + self.allocator_fraction)) + self.context


Part = tuple[Block, BlockPlan, BlockCost]


def local_parameters(parts: Sequence[Part]) -> dict[str, int]:
    """Trainable parameters of a stage by name: local elements; one that several blocks share counts once."""
    return {
        name: elements
        for block, _, cost in parts
        for name, elements in zip(block.parameters, cost.parameter_elements, strict=True)
        if elements
    }


def expert_parameters(parts: Sequence[Part]) -> dict[str, int]:
    """Weights of routed experts among :func:`local_parameters`."""
    return {
        name: elements
        for block, _, cost in parts
        for name, elements, expert in zip(block.parameters, cost.parameter_elements, cost.expert, strict=True)
        if elements and expert
    }


def saved_per_micro_batch(parts: Sequence[Part]) -> int:
    """Bytes that one micro-batch keeps from forward to backward in a stage; what two blocks keep counts once."""
    total, counted = 0, set()
    for block, plan, cost in parts:
        if plan.recompute == "full":
            kept = dict(zip(block.inputs, cost.input_bytes, strict=True))
        else:
            total += cost.saved_bytes - (cost.recompute_bytes if plan.recompute == "selective" else 0)
            kept = dict(zip(block.inputs, cost.saved_input_bytes, strict=True))
        total += sum(nbytes for name, nbytes in kept.items() if name not in counted)
        counted |= {name for name, nbytes in kept.items() if nbytes}
        if plan.recompute != "full":
            counted |= {name for name, saved in zip(block.outputs, cost.saved_outputs, strict=True) if saved}
    return total


def counts_at_peak(queue: Sequence[Action], saved: Mapping[int, int]) -> dict[int, int]:
    """Micro-batches that each stage of a rank holds when the rank holds the most bytes.

    Args:
        queue: the rank's actions, in order.
        saved: stage -> bytes that one micro-batch keeps in it.
    """
    now = dict.fromkeys(saved, 0)
    most, best, held = dict(now), -1, 0
    for action in queue:
        change = {"F": 1, "I": 0}.get(action.kind, -1)  # the gradient of the weights still needs them
        now[action.stage] += change
        held += change * saved[action.stage]
        if held > best:
            best, most = held, dict(now)
    return most


def rank_memory(
    plan: Plan, stages: Sequence[tuple[Sequence[Part], int]], device: Device, trainer: Trainer = AUTOPAR
) -> StageMemory:
    """Peak memory of the stages that one pipeline rank holds.

    Args:
        stages: for each, its blocks with plans and costs, and the most micro-batches it holds at once.
    """
    parts = [part for stage, _ in stages for part in stage]
    elements = sum(local_parameters(parts).values())
    frozen = sum(cost.frozen_bytes for _, _, cost in parts)
    sharded = plan.zero_stage == 3 and plan.mesh.dp_shard > 1
    held = -(-elements // plan.mesh.dp_shard) if sharded else elements
    states = held
    if plan.zero_stage in (1, 2):
        experts = sum(expert_parameters(parts).values()) if plan.mesh.ep > 1 else 0
        replicas = plan.mesh.dp_shard * (plan.mesh.cp if trainer.local_sequence else 1)
        states = (elements - experts) // replicas + experts // max(1, replicas // plan.mesh.ep)
    recomputed = [cost.saved_bytes for _, block, cost in parts if block.recompute == "full"]
    workspace = max((cost.workspace_bytes for _, _, cost in parts), default=0) + max(recomputed, default=0)
    shapes = {kept for _, _, cost in parts for kept in cost.weights}
    unused = sum(shapes) * trainer.weight_gradient_buffers
    bucket = min(elements * FP32, int(plan.gradient_reduction.bucket_mib * MIB)) if plan.mesh.dp > 1 else 0
    return StageMemory(
        parameters=held * trainer.parameter_bytes + frozen,
        gradients=held * trainer.gradient_bytes,
        optimizer=states * trainer.state_bytes,
        activations=sum(in_flight * saved_per_micro_batch(stage) for stage, in_flight in stages),
        workspace=workspace,
        unsharded=_unsharded(plan, trainer, parts) if sharded else 0,
        buffers=bucket + unused,
        context=device.context_bytes,
        allocator_fraction=device.allocator_overhead_fraction,
    )


def _unsharded(plan: Plan, trainer: Trainer, parts: Sequence[Part]) -> int:
    """FSDP's whole tensors: parameters of the two largest units in flight, and gradients: of all units where they are
    kept whole until the last micro-batch, else of the largest."""
    width = max(trainer.gather_bytes, trainer.reduce_bytes)
    units = sorted((sum(cost.parameter_elements) * width for _, _, cost in parts), reverse=True)
    kept_whole = plan.micro_batches > 1 and "fsdp" not in trainer.overlap
    gradients = sum(local_parameters(parts).values()) * FP32 if kept_whole else units[0]
    return sum(units[:2]) + gradients
