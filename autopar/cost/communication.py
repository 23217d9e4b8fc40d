"""CommunicationModel: how long one collective takes on a group of devices.

Measured times of that collective at that group size are interpolated; else the best of ring, hierarchical rings, tree
and in-switch reduction is taken, each ``fixed + latency x steps + volume / bandwidth``
(Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH"; bandwidth terms as in NVIDIA's
nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import bisect
import math

import torch

from autopar.hardware.cluster import Cluster, Link
from autopar.hardware.topology import Group

REDUCING = ("all_reduce", "reduce_scatter")


class CommunicationModel:
    """Collective times on one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._tables: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        for entry in cluster.collectives:
            table = self._tables.setdefault((entry.kind, entry.size, entry.scope), [])
            table.append((float(max(entry.nbytes, 1)), entry.seconds))
        for table in self._tables.values():
            table.sort()

    def collective_time(self, kind: str, nbytes: float, group: Group, dtype: torch.dtype | None = None) -> float:
        """Seconds of one collective, started by all members at once.

        Args:
            kind: all_reduce, all_gather, reduce_scatter, all_to_all or send.
            nbytes: size of the whole tensor as one device would hold it (before an all-reduce or reduce-scatter, after
                an all-gather; for all-to-all the tensor whose shards are exchanged); for send the bytes of the message.
            group: where the members sit.
            dtype: of the elements; unused by today's algorithms, which move bytes.
        """
        if group.size <= 1 or nbytes <= 0:
            return 0.0
        link = self.cluster.links[group.level]
        table = self._tables.get((kind, group.size, link.scope))
        if table:
            return interpolate(table, nbytes)
        if kind == "send":
            return self._send(nbytes, group)
        if kind == "all_to_all":
            return self._all_to_all(nbytes, group)
        passes = 2 if kind == "all_reduce" else 1
        times = [self._ring(kind, nbytes, group, passes)]
        if group.level > 0 and group.members[0] > 1:
            times.append(self._hierarchical(kind, nbytes, group, passes))
        if kind == "all_reduce":
            times.append(self._tree(nbytes, group))
            if group.level == 0 and link.in_switch is not None and group.size > 2:
                times.append(self._in_switch(nbytes, group, link))
        return min(times) + self._overhead(group)

    def _overhead(self, group: Group) -> float:
        return max(link.overhead_s for link in self.cluster.links[: group.level + 1])

    def _bandwidth(self, kind: str, level: int, group: Group) -> float:
        """Bytes/s that one member gets at a level, when all groups that share it are active."""
        link = self.cluster.links[level]
        bandwidth = link.bandwidth * link.efficiency.get(kind, 1.0) / link.oversubscription
        if link.shared:  # by the groups inside one domain, or by all devices of the domain below
            bandwidth /= group.sharing[0] if level == 0 else self.cluster.links[level - 1].devices
        return bandwidth

    def _ring(self, kind: str, nbytes: float, group: Group, passes: int) -> float:
        """One ring through all members: every level carries the same stream.

        At a level above the innermost, the members of one lower domain leave it by their links in parallel.
        """
        size = group.size
        slowest = math.inf
        for level in range(group.level + 1):
            lanes = group.members[level - 1] if level else 1
            if group.members[level] > lanes:
                slowest = min(slowest, self._bandwidth(kind, level, group) * lanes)
        return passes * (self._ring_latency(group) + (size - 1) / size * nbytes / slowest)

    def _ring_latency(self, group: Group) -> float:
        total, joined = 0.0, 1
        for level in range(group.level + 1):
            domains = group.size // joined
            outer = group.size // group.members[level]
            total += (domains - outer) * self.cluster.links[level].latency_s
            joined = group.members[level]
        return total

    def _hierarchical(self, kind: str, nbytes: float, group: Group, passes: int) -> float:
        """A ring at every level, on a share that shrinks by the members below (reduce-scatter in, all-gather out)."""
        total, joined = 0.0, 1
        for level in range(group.level + 1):
            fan = group.members[level] // joined
            if fan > 1:
                moved = (fan - 1) / fan * (nbytes / joined) / self._bandwidth(kind, level, group)
                total += moved + (fan - 1) * self.cluster.links[level].latency_s
            joined = max(joined, group.members[level])
        return passes * total

    def _tree(self, nbytes: float, group: Group) -> float:
        """A double binary tree between domains and a chain inside (Sanders et al. 2009): log steps, ring bandwidth."""
        slowest, latency, joined = math.inf, 0.0, 1
        for level in range(group.level + 1):
            fan = group.members[level] / joined
            lanes = group.members[level - 1] if level else 1
            if fan > 1:
                slowest = min(slowest, self._bandwidth("all_reduce", level, group) * lanes)
                latency += math.ceil(math.log2(fan)) * self.cluster.links[level].latency_s
            joined = group.members[level]
        return 2 * (latency + nbytes / slowest)

    def _in_switch(self, nbytes: float, group: Group, link: Link) -> float:
        """The switch adds: each device sends its tensor once and receives the sum once, its own share twice."""
        assert link.in_switch is not None
        volume = nbytes * (1 + 1 / group.size)
        return 2 * link.latency_s + volume / (link.bandwidth * link.in_switch)

    def _all_to_all(self, nbytes: float, group: Group) -> float:
        """Each member sends an equal part of its shard to every other; levels work at the same time."""
        shard = nbytes / group.size
        slowest, latency, joined = 0.0, 0.0, 1
        for level in range(group.level + 1):
            inside, beyond = group.members[level], group.size - joined
            if inside > joined:
                slowest = max(slowest, shard * beyond / group.size / self._bandwidth("all_to_all", level, group))
                latency = max(latency, self.cluster.links[level].latency_s)
            joined = max(joined, inside)
        return slowest + latency * math.log2(max(group.size, 2)) + self._overhead(group)

    def _send(self, nbytes: float, group: Group) -> float:
        link = self.cluster.links[group.level]
        return link.latency_s + link.overhead_s + nbytes / self._bandwidth("send", group.level, group)


def interpolate(table: list[tuple[float, float]], nbytes: float) -> float:
    """Seconds at ``nbytes`` from (bytes, seconds) points, linear in the logarithms between them.

    Below the first point the time stays (latency); beyond the last it grows with the bytes (bandwidth).
    """
    sizes = [size for size, _ in table]
    if nbytes <= sizes[0]:
        return table[0][1]
    if nbytes >= sizes[-1]:
        return table[-1][1] * nbytes / sizes[-1]
    right = bisect.bisect_right(sizes, nbytes)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    fraction = math.log(nbytes / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + fraction * (math.log(y1) - math.log(y0)))
