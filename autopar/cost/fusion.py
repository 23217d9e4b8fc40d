"""Fusion: chains of pointwise operators that run as one kernel, as compilers and hand-written kernels do.

A fused kernel reads the operands that come from outside, writes the results that are used outside, and recomputes what
is between them in backward, so only its operands are kept.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.cost.operators import VIEWS, base_name, is_pointwise
from autopar.model.graph import OpGraph
from autopar.sharding.placement import local_shape
from autopar.sharding.resolve import ResolvedBlock


@dataclass(frozen=True)
class Fused:
    """One chain.

    Attributes:
        nodes: its pointwise operators.
        forward_bytes, backward_bytes: local memory traffic.
    """

    nodes: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int


def chains(graph: OpGraph, resolved: ResolvedBlock) -> list[Fused]:
    """Maximal groups of pointwise operators of a block that feed each other without a redistribution between."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    through: dict[str, str] = {}  # a view or pick of a chain's result belongs to it
    for name in resolved.block.nodes:
        node = graph.nodes[name]
        passes = base_name(node.op) in VIEWS
        if not passes and not (is_pointwise(node.op) and node.inputs and node.outputs):
            continue
        if not passes:
            parent[name] = name
        for i, operand in enumerate(node.inputs):
            if resolved.edge_into(name, i).steps:
                continue
            source = through.get(operand, operand)
            if source not in parent:
                continue
            if passes:
                through[name] = source
            else:
                parent[root(source)] = root(name)
    groups: dict[str, list[str]] = {}
    for name in parent:
        groups.setdefault(root(name), []).append(name)
    return [_priced(graph, resolved, tuple(nodes), through) for nodes in groups.values()]


def _priced(graph: OpGraph, resolved: ResolvedBlock, nodes: tuple[str, ...], through: dict[str, str]) -> Fused:
    inside = set(nodes)
    uses = Counter(through.get(i, i) for n in nodes for i in graph.nodes[n].inputs)
    outer: Counter[str] = Counter()
    for edge in resolved.edges:
        source = through.get(edge.producer, edge.producer)
        if source in inside:
            outer[source] += sum(1 for name, _ in edge.consumers if name not in inside and name not in through)
    operands = [n for n in uses if n not in inside]
    results = [n for n in nodes if outer[n] or not uses[n]]
    read = {n: _bytes(graph, resolved, n) for n in operands}
    written = sum(_bytes(graph, resolved, n) for n in results)
    grads = sum(b for n, b in read.items() if graph.nodes[n].requires_grad)
    needs = any(graph.nodes[n].requires_grad for n in nodes)
    keeps = any(graph.nodes[n].saved for n in nodes)
    backward = written + grads + (sum(read.values()) if keeps else 0) if needs else 0
    return Fused(nodes, sum(read.values()) + written, backward)


def _bytes(graph: OpGraph, resolved: ResolvedBlock, name: str) -> int:
    node = graph.nodes[name]
    if not node.outputs:
        return 0
    placed = [(p, resolved.sizes[a]) for a, p in resolved.placement_of(name).items()]
    total = node.meta.dtype.itemsize
    for size in local_shape(node.meta.shape, placed):
        total *= size
    return total
