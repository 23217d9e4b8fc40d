"""The process topology of a plan: the device mesh and this process's place on each axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import PlanError
from autopar.plan import INTRA_AXES, MESH_AXES, Plan

AXES = tuple(axis for axis in MESH_AXES if axis != "ep")  # experts live on data-parallel devices


@dataclass(frozen=True)
class Topology:
    """The device mesh over the axes above 1.

    Attributes:
        device: where this process computes.
        mesh: None for a single process.
        sizes: of every axis, those of 1 included.
    """

    device: torch.device
    mesh: DeviceMesh | None
    sizes: dict[str, int]

    def rank(self, axis: str) -> int:
        """This process's index on an axis."""
        return self.mesh.get_local_rank(axis) if self.mesh is not None and self.sizes[axis] > 1 else 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis above 1."""
        assert self.mesh is not None
        return self.mesh.get_group(axis)

    def active(self, *axes: str) -> list[str]:
        """Those of the axes that are above 1."""
        return [axis for axis in axes if self.sizes[axis] > 1]

    def submesh(self, *axes: str) -> DeviceMesh | None:
        """The mesh over those of the axes that are above 1, or None where none is."""
        names = self.active(*axes)
        return self.mesh[tuple(names)] if self.mesh is not None and names else None

    @property
    def intra(self) -> DeviceMesh | None:
        """The mesh on which operators and parameters are placed."""
        return self.submesh(*(axis for axis in INTRA_AXES if axis in self.sizes))

    @property
    def data_shard(self) -> int:
        """Which data shard this process trains on."""
        return self.rank("dp_replicate") * self.sizes["dp_shard"] + self.rank("dp_shard")


def build_topology(plan: Plan) -> Topology:
    """Lays the plan's mesh over the processes of the default group.

    Raises:
        PlanError: the number of processes is not what the plan needs, or it asks for an axis that cannot run yet.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.mesh.devices:
        raise PlanError(
            f"the plan needs {plan.mesh.devices} processes ({plan.mesh.describe()}), there are {world}",
            f"Start {plan.mesh.devices} processes, or search a plan for {world}",
        )
    sizes = {axis: getattr(plan.mesh, axis) for axis in AXES}
    if torch.cuda.is_available() and dist.is_initialized() and dist.get_backend() != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        device = torch.device("cpu")
    active = [axis for axis in AXES if sizes[axis] > 1]
    mesh = None
    if active:
        mesh = init_device_mesh(device.type, tuple(sizes[a] for a in active), mesh_dim_names=tuple(active))
    return Topology(device, mesh, sizes)
