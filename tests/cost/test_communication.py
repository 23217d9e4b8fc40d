"""Collective times: monotone in bytes and bandwidth, and at the published bandwidths where those were measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.communication import CommunicationModel, interpolate
from autopar.hardware import Cluster, group_of
from autopar.hardware.profiles import MeasuredCollective
from autopar.plan import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
CLUSTERS = ("dgx-a100-64", "h100-2tier-512", "a100-pcie-8", "dgx-b200-8", "cloud-a100-slow-32", "local-cpu-8")


def bus_bandwidth(cluster: str, kind: str, nbytes: float = 2**31) -> float:
    """GB/s as nccl-tests counts: 2(n-1)/n of the bytes for an all-reduce, (n-1)/n for the others."""
    where = Cluster.load(cluster)
    size = where.devices
    time = CommunicationModel(where).collective_time(kind, nbytes, group_of(where, Mesh(dp_shard=size), "dp_shard"))
    return (2 if kind == "all_reduce" else 1) * (size - 1) / size * nbytes / time / 1e9


@pytest.mark.parametrize(
    ("cluster", "kind", "low", "high"),
    [  # profiles/measured/collectives.csv
        ("dgx-h100-8", "all_gather", 360, 375),
        ("dgx-h100-8", "all_reduce", 470, 485),
        ("dgx-a100-8", "all_reduce", 200, 230),
        ("h100-pcie-2", "all_reduce", 113, 118),
        ("dgx-b200-8", "all_reduce", 0.7 * 900, 0.75 * 900),
        ("dgx-b200-8", "reduce_scatter", 0.64 * 900, 0.68 * 900),
        ("a100-pcie-8", "all_gather", 0.42 * 30, 0.46 * 30),
    ],
)
def test_published_bandwidths(cluster: str, kind: str, low: float, high: float) -> None:
    assert low <= bus_bandwidth(cluster, kind) <= high


@given(
    cluster=st.sampled_from(CLUSTERS),
    kind=st.sampled_from(KINDS),
    nbytes=st.floats(1, 1e10),
    tp=st.sampled_from([1, 2, 4, 8]),
    axis=st.sampled_from(["tp", "dp_shard"]),
)
def test_more_bytes_or_less_bandwidth_never_faster(cluster: str, kind: str, nbytes: float, tp: int, axis: str) -> None:
    where = Cluster.load(cluster)
    group = group_of(where, Mesh(dp_shard=where.devices // tp, tp=tp), axis)
    model = CommunicationModel(where)
    time = model.collective_time(kind, nbytes, group)
    assert time >= 0
    assert (time > 0) == (group.size > 1)
    assert model.collective_time(kind, 2 * nbytes, group) >= time
    for level in range(len(where.links)):
        links = list(where.links)
        links[level] = replace(links[level], bandwidth=links[level].bandwidth * 1.7)
        faster = CommunicationModel(replace(where, links=tuple(links)))
        assert faster.collective_time(kind, nbytes, group) <= time * (1 + 1e-12)


def test_all_reduce_is_at_most_its_two_halves() -> None:
    where = Cluster.load("dgx-a100-64")
    group = group_of(where, Mesh(dp_shard=64), "dp_shard")
    model = CommunicationModel(where)
    halves = model.collective_time("reduce_scatter", 1e9, group) + model.collective_time("all_gather", 1e9, group)
    assert model.collective_time("all_reduce", 1e9, group) <= halves


def test_groups_across_nodes_share_adapters() -> None:
    """One member a node gets one adapter; eight members a node use all eight in parallel."""
    where = Cluster.load("dgx-a100-64")
    model = CommunicationModel(where)
    thin = model.collective_time("all_gather", 1e9, group_of(where, Mesh(dp_shard=8, tp=8), "dp_shard"))
    wide = model.collective_time("all_gather", 1e9, group_of(where, Mesh(dp_shard=64), "dp_shard"))
    assert thin > 4 * wide


def test_shared_link_divides_its_bandwidth() -> None:
    where = Cluster.load("local-cpu-4")
    model = CommunicationModel(where)
    alone = model.collective_time("all_gather", 1e8, group_of(where, Mesh(tp=2), "tp"))
    beside = model.collective_time("all_gather", 1e8, group_of(where, Mesh(dp_shard=2, tp=2), "tp"))
    assert beside == pytest.approx(2 * alone, rel=0.01)


def test_measured_table_comes_first() -> None:
    where = Cluster.load("local-cpu-2")
    points = [(1000, 0.1), (100_000, 0.4)]
    table = tuple(MeasuredCollective("all_reduce", 2, "node", size, seconds) for size, seconds in points)
    model = CommunicationModel(replace(where, collectives=table))
    group = group_of(where, Mesh(tp=2), "tp")
    assert model.collective_time("all_reduce", 1000, group) == pytest.approx(0.1)
    assert model.collective_time("all_reduce", 10_000, group) == pytest.approx(0.2)
    assert model.collective_time("all_reduce", 200_000, group) == pytest.approx(0.8)
    assert model.collective_time("all_gather", 1000, group) < 0.01


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 10)), min_size=1, max_size=8), st.floats(1, 1e10))
def test_interpolation_stays_between_neighbours(points: list[tuple[float, float]], nbytes: float) -> None:
    table = sorted({round(x): (x, y) for x, y in points}.values())
    value = interpolate(table, nbytes)
    if nbytes <= table[-1][0]:
        assert min(y for _, y in table) * 0.999 <= value <= max(y for _, y in table) * 1.001
    else:
        assert value >= table[-1][1]
