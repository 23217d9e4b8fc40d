"""Cluster: devices and the levels of network between them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.errors import ProfileError
from autopar.hardware.device import Device
from autopar.hardware.locations import find
from autopar.hardware.profiles import MeasuredCollective, Overheads, Profile
from autopar.hardware.schema import ClusterFile, check_cluster, read_cluster
from autopar.units import GBPS, GIB


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Attributes:
        scope: name of the level, ``node`` for the innermost.
        devices: devices in one domain of this level.
        bandwidth: bytes/s and direction, per device (unless ``shared``).
        latency_s: of one hop between two devices of the level.
        oversubscription: by what factor the level above is thinner than the sum of its devices' links.
        efficiency: fraction of the bandwidth that each kind of collective reaches.
        overhead_s: fixed time of one collective call.
        in_switch: fraction of the bandwidth reached when switches reduce, or None where they cannot.
        shared: the bandwidth is not each device's own: the groups inside a domain (innermost level) or the devices of
            one domain below (outer levels) share it.
    """

    scope: str
    devices: int
    bandwidth: float
    latency_s: float
    oversubscription: float = 1.0
    efficiency: dict[str, float] = field(default_factory=dict)
    overhead_s: float = 0.0
    in_switch: float | None = None
    shared: bool = False


@dataclass(frozen=True)
class NodeGroup:
    """Like nodes within a cluster of unlike ones."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True)
class Cluster:
    """Devices, in nodes, joined by links.

    Attributes:
        device: the device of every node; in a cluster of unlike groups that of the first group (see ``groups``).
        links: innermost level first; each domain of a level is made of whole domains of the level below.
        memory_reserve_bytes: kept free on each device.
        collectives: measured collectives, if a profile was attached.
        overheads: measured overheads, if a profile was attached.
        source: file it came from.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    links: tuple[Link, ...]
    memory_reserve_bytes: int = 0
    collectives: tuple[MeasuredCollective, ...] = ()
    overheads: Overheads = field(default_factory=Overheads)
    source: str = ""
    description: str = ""

    @property
    def device(self) -> Device:
        return self.groups[0].device

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        return self.groups[0].devices_per_node

    @property
    def memory_limit_bytes(self) -> int:
        """What a plan may take on the smallest device: its memory less the reserve."""
        return min(group.device.memory_bytes for group in self.groups) - self.memory_reserve_bytes

    def device_of(self, rank: int) -> Device:
        """The device of a global rank; groups lie one after the other."""
        for group in self.groups:
            if rank < group.devices:
                return group.device
            rank -= group.devices
        raise IndexError(f"rank {rank} is outside the cluster {self.name!r}")

    @staticmethod
    def load(name_or_path: str | Path) -> Cluster:
        """Reads a cluster by name or path.

        Raises:
            ProfileError: it does not exist, a field is wrong, or its device is unknown.
        """
        path = find("clusters", str(name_or_path))
        return from_file(read_cluster(path), path)

    @staticmethod
    def build(
        device: str,
        nodes: int,
        devices_per_node: int,
        intra_node: str,
        inter_node: str = "infiniband",
        inter_node_gbps: float | None = None,
        memory_reserve_gib: float = 0.0,
    ) -> Cluster:
        """A regular cluster without a file.

        Args:
            device: name of a device.
            intra_node, inter_node: kinds of link, as in ``profiles/links.toml``.
            inter_node_gbps: gigabit/s per device and direction between nodes; unset, that of the kind.

        Raises:
            ProfileError: the device or a kind of link is unknown, or a size is not positive.
        """
        links: list[dict[str, Any]] = []
        if devices_per_node > 1:
            links.append({"scope": "node", "type": intra_node})
        if nodes > 1:
            rate = {} if inter_node_gbps is None else {"bandwidth_gbps": inter_node_gbps}
            links.append({"scope": "cluster", "type": inter_node, **rate})
        data = {
            "name": f"{nodes * devices_per_node}x-{device}",
            "device": device,
            "nodes": nodes,
            "devices_per_node": devices_per_node,
            "memory_reserve_gib": memory_reserve_gib,
            "link": links,
        }
        return from_file(check_cluster(data, "cluster"), Path("."))

    def with_profile(self, profile: Profile | str | Path) -> Cluster:
        """The same cluster with everything that was measured on it.

        Raises:
            ProfileError: the profile is unreadable or belongs to another device.
        """
        if not isinstance(profile, Profile):
            profile = Profile.load(profile)
        groups = tuple(
            replace(g, device=g.device.with_profile(profile)) if g.device.name == profile.device else g
            for g in self.groups
        )
        if groups == self.groups and profile.device not in {g.device.name for g in self.groups}:
            self.device.with_profile(profile)  # raises, naming both devices
        return replace(
            self,
            groups=groups,
            collectives=profile.collectives or self.collectives,
            overheads=profile.overheads,
        )


def from_file(spec: ClusterFile, path: Path) -> Cluster:
    """The cluster that a checked file describes.

    Raises:
        ProfileError: a device is unknown, links are missing or do not nest.
    """
    groups = _groups(spec, path)
    if spec.memory_per_device_gib is not None:
        memory = int(spec.memory_per_device_gib * GIB)
        groups = tuple(replace(g, device=replace(g.device, memory_bytes=memory)) for g in groups)
    cluster = Cluster(
        name=spec.name,
        groups=groups,
        links=_links(spec, groups, path),
        memory_reserve_bytes=int(spec.memory_reserve_gib * GIB),
        source=str(path),
        description=spec.description,
    )
    if cluster.memory_limit_bytes <= 0:
        raise ProfileError(
            f"cluster file {str(path)!r}: memory_reserve_gib: {spec.memory_reserve_gib} leaves no memory",
            "Reserve less than the device has",
        )
    return cluster.with_profile(_beside(spec.profile, path)) if spec.profile else cluster


def _beside(name: str, path: Path) -> str:
    beside = path.parent / name
    return str(beside) if beside.is_file() else name


def _groups(spec: ClusterFile, path: Path) -> tuple[NodeGroup, ...]:
    try:
        if spec.group:
            return tuple(
                NodeGroup(g.name, Device.load(g.device, path.parent), g.nodes, g.devices_per_node) for g in spec.group
            )
        device = Device.load(spec.device, path.parent)
        return (NodeGroup(device.name, device, spec.nodes or 1, spec.devices_per_node or 1),)  # set, by the schema
    except ProfileError as error:
        raise ProfileError(f"cluster file {str(path)!r}: device: {error.what}", error.remedy) from None


def _links(spec: ClusterFile, groups: tuple[NodeGroup, ...], path: Path) -> tuple[Link, ...]:
    total = sum(g.devices for g in groups)
    per_node = min(g.devices_per_node for g in groups)
    links = []
    below = 1
    for level in spec.link:
        span = level.devices or (per_node if level.scope == "node" else total)
        if span % below or span < below:
            raise ProfileError(
                f"cluster file {str(path)!r}: link {level.scope!r}: a domain of {span} devices is not made of whole "
                f"domains of {below} devices of the level below",
                "List links from the innermost out, each a multiple of the last",
            )
        links.append(
            Link(
                scope=level.scope,
                devices=span,
                bandwidth=level.bandwidth_gbps * GBPS,
                latency_s=level.latency_us * 1e-6,
                oversubscription=level.oversubscription,
                efficiency={str(kind): value for kind, value in level.efficiency.items()},
                overhead_s=level.overhead_us * 1e-6,
                in_switch=level.in_switch,
                shared=level.shared,
            )
        )
        below = span
    if below < total:
        raise ProfileError(
            f"cluster file {str(path)!r}: link: the outermost level joins {below} of {total} devices",
            "Add a [[link]] that joins them all",
        )
    return tuple(links)
