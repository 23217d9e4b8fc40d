"""How much each micro-batch's mean loss counts in the mean over the global batch.

A cross entropy that ignores labels is a mean over valid labels; micro-batches and data shards then weigh in proportion
to their valid labels. Any other loss is a mean over samples, and all micro-batches weigh alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn

from autopar.model.graph import OpGraph

Counter = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def valid_label_counter(graph: OpGraph) -> Counter | None:
    """A function from a micro-batch to its number of valid labels, or None where the loss is a plain mean.

    The labels must follow from the batch inputs alone (views, shifts); else None.
    """
    node = graph.fx_node(graph.loss)
    if graph.nodes[graph.loss].op != "aten.cross_entropy_loss.default":
        return None
    reduction = node.args[3] if len(node.args) > 3 else node.kwargs.get("reduction", 1)
    target = node.args[1]
    assert isinstance(target, fx.Node)
    if reduction != 1 or graph.nodes[target.name].meta.dtype.is_floating_point:
        return None
    ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", -100)
    labels = _labels_module(graph, target)
    if labels is None:
        return None
    module, inputs = labels
    return lambda batch: (module(*(batch[name] for name in inputs)) != ignored).sum()


def _labels_module(graph: OpGraph, labels: fx.Node) -> tuple[nn.Module, list[str]] | None:
    """The part of the graph that makes the labels from batch inputs."""
    needed: set[str] = set()
    stack = [labels]
    while stack:
        node = stack.pop()
        if node.name in needed:
            continue
        if graph.nodes[node.name].kind not in ("op", "input"):
            return None
        needed.add(node.name)
        stack.extend(node.all_input_nodes)
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    inputs: list[str] = []
    for node in graph.fx_graph.nodes:
        if node.name in needed:
            copies[node] = part.node_copy(node, lambda n: copies[n])
            if node.op == "placeholder":
                inputs.append(str(node.target))
    part.output(copies[labels])
    return fx.GraphModule(nn.Module(), part), inputs
