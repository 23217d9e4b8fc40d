"""Group: where the members of a process group sit on the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.hardware.cluster import Cluster
from autopar.plan import MESH_AXES, Mesh


@dataclass(frozen=True)
class Group:
    """One of the like groups that a mesh axis makes.

    Attributes:
        size: members.
        stride: distance in ranks between neighbours (of the innermost axis, if several axes make the group).
        members: for each link of the cluster, innermost first, how many members share one domain of it.
        sharing: for each link, how many groups of this axis are active in one domain at the same time.
    """

    size: int
    stride: int
    members: tuple[int, ...]
    sharing: tuple[int, ...]

    @property
    def level(self) -> int:
        """Index of the innermost link that joins all members."""
        for level, count in enumerate(self.members):
            if count == self.size:
                return level
        return len(self.members) - 1


def axis_stride(mesh: Mesh, axis: str) -> int:
    """Distance in ranks between neighbours along an axis; expert groups lie innermost in the data-parallel ranks."""
    if axis == "ep":
        return mesh.cp * mesh.tp
    order = [a for a in MESH_AXES if a != "ep"]
    return math.prod(getattr(mesh, a) for a in order[order.index(axis) + 1 :])


def group_of(cluster: Cluster, mesh: Mesh, axis: str | Sequence[str]) -> Group:
    """The group of one mesh axis, or of several axes together (``("dp_replicate", "dp_shard")``).

    Rank 0's group stands for all: meshes are regular, so the others differ at most in where they are cut.
    ``dp`` is short for ``dp_replicate`` and ``dp_shard`` together, and ``edp`` for the data-parallel replicas of one
    expert.

    Raises:
        PlanError: the axis is unknown.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    pairs: list[tuple[int, int]] = []
    for name in axes:
        pairs.extend(_axis(mesh, name))
    pairs = [(size, stride) for size, stride in pairs if size > 1]
    ranks = [0]
    for size, stride in pairs:
        ranks = [r + i * stride for r in ranks for i in range(size)]
    size = len(ranks)
    members = tuple(max(1, _most_in_one_domain(ranks, link.devices)) for link in cluster.links)
    busy = min(mesh.devices, cluster.devices)
    sharing = tuple(
        max(1, min(link.devices, busy) // count) for link, count in zip(cluster.links, members, strict=True)
    )
    return Group(size, min((stride for _, stride in pairs), default=1), members, sharing)


def _axis(mesh: Mesh, name: str) -> list[tuple[int, int]]:
    if name == "dp":
        return [*_axis(mesh, "dp_replicate"), *_axis(mesh, "dp_shard")]
    if name == "edp":
        return [(max(1, mesh.dp // mesh.ep), mesh.cp * mesh.tp * mesh.ep)]
    if name not in MESH_AXES:
        raise PlanError(f"mesh axis {name!r} is unknown", f"Axes: {', '.join(MESH_AXES)}, dp, edp")
    return [(getattr(mesh, name), axis_stride(mesh, name))]


def _most_in_one_domain(ranks: Sequence[int], span: int) -> int:
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // span] = counts.get(rank // span, 0) + 1
    return max(counts.values())
