"""Lowering: one block of the captured graph becomes a module that computes on local shards.

Operators are those of the graph, rewritten by :func:`autopar.sharding.localize.localize`; every redistribution is an
edge of :func:`autopar.sharding.resolve.resolve`. Nothing else communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.model.graph import OpGraph
from autopar.runtime.collectives import Redistribute
from autopar.runtime.random import ShardedRandom, is_random
from autopar.runtime.topology import Topology
from autopar.sharding import ops
from autopar.sharding.localize import LocalCall, localize
from autopar.sharding.resolve import OUTPUT, Edge, ResolvedBlock


class GroupOp(nn.Module):
    """An operator with a collective inside, bound to its process group."""

    def __init__(self, function: Callable[..., Any], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.function, self.group = function, group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, group=self.group, **kwargs)


def lower_block(
    graph: OpGraph, resolved: ResolvedBlock, topology: Topology, tensors: dict[str, torch.Tensor]
) -> fx.GraphModule:
    """The local module of one block.

    Args:
        graph: at the plan's micro-batch size.
        resolved: the block's strategies and edges.
        topology: gives the process groups.
        tensors: local parameters (nn.Parameter, DTensor where placed on a mesh), buffers and constants by graph name.

    Returns:
        A module whose positional inputs are ``block.inputs`` and whose result is the tuple ``block.outputs``; its
        parameters carry the names they have in the user's state_dict.
    """
    return _Lowering(graph, resolved, topology, tensors).build()


class _Lowering:
    def __init__(
        self, graph: OpGraph, resolved: ResolvedBlock, topology: Topology, tensors: dict[str, torch.Tensor]
    ) -> None:
        self.graph, self.resolved, self.topology, self.tensors = graph, resolved, topology, tensors
        self.block = resolved.block
        self.local = fx.Graph()
        self.root = nn.Module()
        self.made: dict[str, fx.Node] = {}  # producer -> its local result
        self.moved: dict[int, fx.Node] = {}  # edge -> the redistributed result
        self.helpers = 0

    def build(self) -> fx.GraphModule:
        for name, placed in zip(self.block.inputs, self.resolved.input_placements, strict=True):
            if self.graph.nodes[name].kind == "input" and any(p.is_shard for p in placed.values()):
                raise PlanError(f"the batch input {name!r} is placed as a shard", "Batch inputs are whole: R")
            self.made[name] = self.local.placeholder(name)
        for name in self.block.parameters:
            self._attribute(name)
        for name in (*self.block.prelude, *self.block.nodes):
            self.made[name] = self._call(name)
        results = tuple(self._operand(OUTPUT, i) for i in range(len(self.block.outputs)))
        self.local.output(results)
        return fx.GraphModule(self.root, self.local, class_name="Block")

    def _attribute(self, name: str) -> None:
        """A parameter, buffer or constant under its own name."""
        target = self.graph.nodes[name].op
        owner, _, leaf = target.rpartition(".")
        module = self.root
        for part in owner.split(".") if owner else []:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        tensor = self.tensors[name]
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor, persistent=self.graph.nodes[name].kind == "buffer")
        node = self.local.get_attr(target)
        self.made[name] = self.local.call_method("to_local", (node,)) if isinstance(tensor, DTensor) else node

    def _call(self, name: str) -> fx.Node:
        call = localize(self.graph, name, self.resolved.strategies[name], self.resolved.sizes)
        count = iter(range(len(self.graph.nodes[name].inputs)))

        def load(node: fx.Node) -> fx.Node:
            operand = self._operand(name, next(count))
            if call.operand_scale is not None and node is call.operand_scale[0]:
                return self.local.call_function(ops.scale_forward, (operand, call.operand_scale[1]))
            return operand

        args, kwargs = fx.map_arg(call.args, load), fx.map_arg(call.kwargs, load)
        result = self._emit(name, call, args, on_device(kwargs, self.topology.device))
        if call.output_scale is not None:
            result = self.local.call_function(torch.mul, (result, call.output_scale))
        return result

    def _emit(self, name: str, call: LocalCall, args: Any, kwargs: Any) -> fx.Node:
        if call.axis is not None:
            return self._helper(GroupOp(call.target, self.topology.group(call.axis)), args, kwargs)
        split = [axis for axis, s in self.resolved.strategies[name].items() if not s.is_replicated]
        if split and is_random(self.graph, self.graph.nodes[name]):
            place = tuple(self.topology.rank(axis) for axis in split)
            return self._helper(ShardedRandom(call.target, place, self.topology.device), args, kwargs)
        return self.local.call_function(call.target, args, kwargs)

    def _helper(self, module: nn.Module, args: Any, kwargs: Any = None) -> fx.Node:
        name = f"_autopar_{self.helpers}"
        self.helpers += 1
        self.root.add_module(name, module)
        return self.local.call_module(name, args, kwargs or {})

    def _operand(self, node: str, index: int) -> fx.Node:
        edge: Edge = self.resolved.edge_into(node, index)
        if id(edge) not in self.moved:
            value = self.made[edge.producer]
            for step in edge.steps:
                value = self._helper(Redistribute(step.conversion, self.topology.group(step.axis)), (value,))
            self.moved[id(edge)] = value
        return self.moved[id(edge)]


def on_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Factory calls (arange, zeros) were captured on meta."""
    return {k: device if k == "device" and v is not None else v for k, v in kwargs.items()}
