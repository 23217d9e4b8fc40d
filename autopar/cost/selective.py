"""Selective recomputation: what is cheap to make again for the memory that it keeps.

Where attention materialises its scores, the core of attention (Korthikanti et al. 2022, arXiv 2205.05198, section 5);
else everything but products and attention, and every second product (torchtitan's per-operator policy, Liang et al.
2024, arXiv 2410.06511, section 2.2.1).
"""

from __future__ import annotations

from autopar.cost.operators import PRODUCTS, SDPA, base_name
from autopar.model.graph import OpGraph
from autopar.sharding.resolve import ResolvedBlock


def again(graph: OpGraph, resolved: ResolvedBlock) -> dict[str, float]:
    """Operators that selective recomputation runs again, with the part of them."""
    nodes = resolved.block.nodes
    core = _scores(graph, nodes)
    if core:
        return dict.fromkeys(core, 1.0)
    found: dict[str, float] = {}
    for name in nodes:
        node = graph.nodes[name]
        if SDPA in node.op:
            continue
        found[name] = 0.5 if base_name(node.op) in PRODUCTS else 1.0
    return found


def _scores(graph: OpGraph, nodes: tuple[str, ...]) -> list[str]:
    """Products of two activations, and the softmax and dropout between them."""
    products = [
        i
        for i, name in enumerate(nodes)
        if base_name(graph.nodes[name].op) in ("matmul", "bmm", "baddbmm")
        and all(graph.nodes[operand].kind == "op" for operand in graph.nodes[name].inputs)
    ]
    return list(nodes[products[0] : products[-1] + 1]) if len(products) >= 2 else []


def after_last_saved(graph: OpGraph, resolved: ResolvedBlock) -> frozenset[str]:
    """Operators behind the last one that backward needs the result or the own saved tensors of."""
    nodes = resolved.block.nodes
    needed = -1
    place = {name: i for i, name in enumerate(nodes)}
    for i, name in enumerate(nodes):
        for saved in graph.nodes[name].saved:
            needed = max(needed, i if saved.source is None else place.get(saved.source, -1))
    return frozenset(nodes[needed + 1 :])
