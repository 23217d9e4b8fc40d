"""A one-operator-at-a-time OpGraph, straight from torch.export, for tests of the sharding rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from autopar.model.graph import OpGraph, OpNode, TensorMeta


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def tiny_graph(function: Callable[..., Any], inputs: list[torch.Tensor]) -> OpGraph:
    """Exports a function of tensors; its floating inputs count as needing gradient."""
    exported = torch.export.export(_Function(function), tuple(inputs), strict=False)
    nodes: dict[str, OpNode] = {}
    for node in exported.graph.nodes:
        if node.op == "output":
            continue
        value = node.meta["val"]
        metas = tuple(
            TensorMeta(tuple(v.shape), v.dtype) for v in (value if isinstance(value, list | tuple) else [value])
        )
        operands: list[str] = []
        fx.map_arg((node.args, node.kwargs), lambda n, operands=operands: operands.append(n.name))
        grad = metas[0].dtype.is_floating_point and (
            node.op == "placeholder" or any(nodes[name].requires_grad for name in operands)
        )
        kind = "input" if node.op == "placeholder" else "op"
        target = node.target
        op = node.name if kind == "input" else "getitem" if "getitem" in str(target) else str(target)
        nodes[node.name] = OpNode(node.name, kind, op, tuple(operands), metas, requires_grad=grad)
    return OpGraph(exported.graph, nodes, (), 1, 1, "", "tiny")
