"""Running statistics of batch norms under a plan.

A batch norm normalises by its micro-batch on its data shard, and its running mean and variance follow every
micro-batch, as with gradient accumulation under DDP on one process each. After a step they are averaged over the data
shards, so that all replicas, and a checkpoint that goes on on another mesh, hold the same. Recomputation of a block
leaves them alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from autopar.model.graph import OpGraph
from autopar.model.lasting import changes_its_input
from autopar.runtime.collectives import all_reduce_coalesced
from autopar.runtime.topology import Topology

_RUNNING, _TRAINING = (3, 4), 5  # arguments of aten.batch_norm


def running_statistics(graph: OpGraph) -> tuple[set[str], set[str]]:
    """Names of the buffers that hold running means and variances, and of those that count batches."""
    running: set[str] = set()
    counts: set[str] = set()
    for node in graph.fx_graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.batch_norm.default and node.args[_TRAINING]:
            running.update(graph.nodes[node.args[i].name].op for i in _RUNNING if node.args[i] is not None)
        elif changes_its_input(node) and graph.nodes[node.args[0].name].kind == "buffer":
            counts.add(graph.nodes[node.args[0].name].op)
    return running, counts


def average_over_data(statistics: list[torch.Tensor], topology: Topology, bucket_bytes: float) -> None:
    """Averages over all data shards, in place."""
    axes = topology.active("dp_replicate", "dp_shard")
    for axis in axes:
        all_reduce_coalesced(statistics, topology.group(axis), bucket_bytes)
    if axes and statistics:
        torch._foreach_div_(statistics, topology.sizes["dp_replicate"] * topology.sizes["dp_shard"])


@contextmanager
def unchanged(block: nn.Module) -> Iterator[None]:
    """While it holds, what the block writes into its buffers is undone at the end.

    Through ``data``, so that autograd does not take a buffer that it has saved for changed.
    """
    buffers = list(block.buffers())
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)
