"""Random operators (dropout): independent between data shards and stages, alike where an activation is replicated,
different where it is sharded, and the same again when a step is repeated or recomputed.

Every step seeds the default generator from the plan's seed, the step, the data shard and the pipeline rank; so the
processes of one operator mesh draw the same numbers. An operator that works on a shard draws one number from that
common stream and its place on the mesh gives it a stream of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from autopar.model.graph import OpGraph, OpNode
from autopar.runtime.topology import Topology


def is_random(graph: OpGraph, node: OpNode) -> bool:
    """Whether an operator draws random numbers in training."""
    call = graph.fx_node(node.name)
    if node.kind != "op" or not isinstance(call.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in call.target.tags:
        return False
    for i, argument in enumerate(call.target._schema.arguments):
        value = call.args[i] if i < len(call.args) else call.kwargs.get(argument.name, argument.default_value)
        if argument.name in ("p", "dropout_p", "dropout") and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True


def seed_of(*parts: int) -> int:
    """A 63-bit seed; differs in all bits when any part differs."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big") >> 1


@contextlib.contextmanager
def step_stream(seed: int, step: int, topology: Topology) -> Iterator[None]:
    """Seeds the default generators for one step; gives them back as they were afterwards."""
    with torch.random.fork_rng(_devices(topology.device)):
        torch.manual_seed(seed_of(seed, step, topology.data_shard, topology.rank("pp")))
        yield


class ShardedRandom(nn.Module):
    """A random operator on a shard: its own stream, derived from the common one.

    Args:
        function: the local operator.
        place: this process's index on each axis that splits the operator.
    """

    def __init__(self, function: Any, place: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self.function, self.place, self.devices = function, place, _devices(device)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        common = int(torch.randint(2**62, (), dtype=torch.int64))  # on the host: no wait for the device
        with torch.random.fork_rng(self.devices):
            torch.manual_seed(seed_of(common, *self.place))
            return self.function(*args, **kwargs)


def _devices(device: torch.device) -> list[int]:
    return [device.index or 0] if device.type == "cuda" else []
