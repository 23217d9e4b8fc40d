"""Cluster files and where groups sit on them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ProfileError
from autopar.hardware import Cluster, group_of
from autopar.hardware.locations import available
from autopar.plan import MESH_AXES, Mesh

LOCAL = 'name = "x"\ndevice = "cpu-local"\nnodes = 1\ndevices_per_node = 2\n'
LINK = '[[link]]\nscope = "node"\nbandwidth_gbps = 1.0\nlatency_us = 1.0\n'


@pytest.mark.parametrize("name", sorted(available("clusters")))
def test_shipped_cluster_is_whole(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert 0 < cluster.memory_limit_bytes < min(g.device.memory_bytes for g in cluster.groups)
    assert cluster.devices == sum(g.nodes * g.devices_per_node for g in cluster.groups)
    if cluster.devices > 1:
        assert cluster.links[-1].devices == cluster.devices
        assert cluster.device_of(cluster.devices - 1) is cluster.groups[-1].device
    with pytest.raises(IndexError):
        cluster.device_of(cluster.devices)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LOCAL + LINK.replace("bandwidth_gbps = 1.0", "bandwidth_gbps = 0"), "link.0.bandwidth_gbps: .*greater than 0"),
        (LOCAL.replace("nodes = 1", "nodes = 0") + LINK, "nodes: "),
        (LOCAL.replace("devices_per_node = 2", "devices_per_node = -2") + LINK, "devices_per_node: "),
        (LOCAL.replace("cpu-local", "cpu-locale") + LINK, "device 'cpu-locale' is unknown.*cpu-local"),
        (LOCAL.replace("device =", "devise =") + LINK, "unknown field 'devise'"),
        (LOCAL.replace("nodes = 1\n", "") + LINK, "nodes: is missing"),
        (LOCAL, "the outermost level joins 1 of 2 devices"),
        (LOCAL + '[[link]]\nscope = "node"\ntype = "nvlink99"\n', "link type 'nvlink99' is unknown.*nvlink3"),
        (LOCAL + LINK + "speed = 3\n", "unknown field 'link.0.speed'"),
        (LOCAL + "memory_reserve_gib = 1000.0\n" + LINK, "leaves no memory"),
        (LOCAL + LINK + LINK.replace('"node"', '"rack"\ndevices = 3'), "not made of whole domains"),
        ("name = ", "cannot be read as TOML"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match=message):
        Cluster.load(path)


def test_unknown_cluster_lists_what_exists() -> None:
    with pytest.raises(ProfileError, match=r"cluster 'nope' is unknown.*local-cpu-2"):
        Cluster.load("nope")
    with pytest.raises(ProfileError, match=r"cluster file 'a/nope.toml' does not exist"):
        Cluster.load("a/nope.toml")


def test_built_equals_loaded() -> None:
    built = Cluster.build("a100-sxm-80gb", 8, 8, "nvlink3", inter_node_gbps=200)
    loaded = Cluster.load("dgx-a100-64")
    assert (built.links, built.device, built.devices) == (loaded.links, loaded.device, loaded.devices)


def test_device_beside_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(available("devices")["l40s"].read_text())
    (tmp_path / "c.toml").write_text(LOCAL.replace("cpu-local", "own.json") + LINK)
    assert Cluster.load(tmp_path / "c.toml").device.name == "l40s"


small = st.sampled_from([1, 2, 3, 4, 8])


@given(pp=small, dr=small, ds=small, cp=small, tp=small)
def test_axes_partition_the_ranks(pp: int, dr: int, ds: int, cp: int, tp: int) -> None:
    mesh = Mesh(pp=pp, dp_replicate=dr, dp_shard=ds, cp=cp, tp=tp)
    per_node = next(n for n in (8, 4, 2, 3, 1) if mesh.devices % n == 0)
    cluster = Cluster.build("a100-sxm-80gb", mesh.devices // per_node, per_node, "nvlink3")
    stride = 1
    for axis in reversed([a for a in MESH_AXES if a != "ep"]):
        group = group_of(cluster, mesh, axis)
        assert group.size == getattr(mesh, axis)
        if group.size > 1:
            assert group.stride == stride
            assert group.members[-1] == group.size
        stride *= getattr(mesh, axis)
        assert all(1 <= m <= group.size for m in group.members)
        assert list(group.members) == sorted(group.members)
    assert stride == mesh.devices
    assert group_of(cluster, mesh, "dp").size == mesh.dp


def test_where_groups_sit() -> None:
    cluster = Cluster.load("dgx-a100-64")
    mesh = Mesh(pp=2, dp_shard=4, tp=8)
    assert group_of(cluster, mesh, "tp").members == (8, 8)
    assert group_of(cluster, mesh, "tp").level == 0
    assert group_of(cluster, mesh, "dp_shard").members == (1, 4)
    assert group_of(cluster, mesh, "dp_shard").level == 1
    assert group_of(cluster, mesh, "dp_shard").sharing[1] == 16
    whole = group_of(cluster, mesh, MESH_AXES)
    assert whole.size == math.prod((2, 4, 8))
    experts = Mesh(dp_shard=32, tp=2, ep=4)
    assert group_of(cluster, experts, "ep").members == (4, 4)
    assert group_of(cluster, experts, "edp").members == (1, 8)
