"""Parameters of this process: the whole model's initial weights from the plan's seed, cut as the plan places them."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.runtime.topology import Topology
from autopar.sharding.placement import Placement
from autopar.sharding.resolve import ResolvedBlock


def initial_weights(job: TrainingJob, seed: int) -> dict[str, torch.Tensor]:
    """Parameters and buffers by state_dict name, as a single process with this seed would have them."""
    torch.manual_seed(seed)
    model = job.loss_module().model
    named = dict(model.named_parameters(remove_duplicate=False))
    return {**named, **dict(model.named_buffers(remove_duplicate=False))}


def local_tensors(
    graph: OpGraph,
    blocks: list[ResolvedBlock],
    topology: Topology,
    weights: dict[str, torch.Tensor],
    as_dtensors: bool,
) -> dict[str, torch.Tensor]:
    """This process's part of every tensor that some blocks read.

    Args:
        as_dtensors: make parameters DTensors on the operator mesh, as FSDP wants them; else they are plain local
            tensors, which every step and the optimizer handle faster, and become DTensors in a state_dict only.

    Returns:
        By graph name: an nn.Parameter, or a plain local tensor for buffers and constants. A tensor that several blocks
        share is one object.
    """
    made: dict[str, torch.Tensor] = {}
    for resolved in blocks:
        for name in resolved.block.parameters:
            if name in made:
                continue
            node = graph.nodes[name]
            if node.kind == "constant":
                made[name] = graph.constants[node.op].to(topology.device)
                continue
            whole = weights[node.op].detach()
            placed = resolved.parameter_placements.get(name, {})
            local = whole
            for axis, placement in placed.items():
                if placement.is_shard:
                    local = local.chunk(resolved.sizes[axis], placement.dim)[topology.rank(axis)]
            local = local.clone().to(topology.device)
            if node.kind == "parameter":
                whole = as_whole(local, placed, topology) if as_dtensors else local
                made[name] = nn.Parameter(whole, requires_grad=node.requires_grad)
            else:
                made[name] = local
    return made


def as_whole(local: torch.Tensor, placed: dict[str, Placement], topology: Topology) -> torch.Tensor:
    """The tensor of which ``local`` is this process's part: a DTensor over the same memory, or ``local`` itself."""
    mesh = topology.intra
    if mesh is None:
        return local
    names = mesh.mesh_dim_names or ()
    placements = [Shard(placed[a].dim) if placed[a].is_shard else Replicate() for a in names]
    return DTensor.from_local(local, mesh, placements, run_check=False)
