"""The rules against DTensor's own: same operands, same result placement, and no communication there either."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.sharding.placement import Placement, local_shape
from autopar.sharding.rules import strategies
from tests.sharding.test_rules import CASES
from tests.sharding.tiny import tiny_graph

SIZE = 2


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    yield init_device_mesh("cpu", (SIZE,))
    dist.destroy_process_group()


def as_dtensor(p: Placement) -> Any:
    return Shard(p.dim) if p.is_shard else Replicate() if p.kind == "R" else Partial()


# DTensor has no rule for the CPU attention kernel, and its convolution only splits space.
UNLIKE = {"attention", "attention_causal", "attention_grouped", "attention_mask", "conv2d"}


@pytest.mark.parametrize("case", sorted(set(CASES) - UNLIKE))
def test_result_placements_agree_with_dtensor(case: str, mesh: DeviceMesh) -> None:
    function, inputs = CASES[case]
    graph = tiny_graph(function, inputs)
    node = next(graph.of_kind("op"))
    call = graph.fx_node(node.name)
    agreed = 0
    for strategy in strategies(graph, node, SIZE):
        operands = {}
        for name, p, n in zip(dict.fromkeys(node.inputs), strategy.inputs, call.all_input_nodes, strict=True):
            meta = graph.nodes[name].meta
            local = torch.zeros(local_shape(meta.shape, [(p, SIZE)]), dtype=meta.dtype)
            operands[n] = DTensor.from_local(local, mesh, [as_dtensor(p)], run_check=False)
        with CommDebugMode() as counted:
            try:
                out = call.target(*fx.map_arg(call.args, operands.__getitem__), **call.kwargs)
            except (RuntimeError, NotImplementedError):
                continue  # DTensor refuses what it would have to redistribute
        out = out[0] if isinstance(out, list | tuple) else out
        if counted.get_total_counts():
            continue  # DTensor prefers to communicate first; ours needs none
        got = out.placements[0]
        if strategy.output.kind == "P":
            assert got.is_partial(), str(strategy)
        else:
            assert got == as_dtensor(strategy.output), str(strategy)
        agreed += 1
    assert agreed >= 1
