"""What was captured, by block kind, as plain data for tables and JSON."""

from __future__ import annotations

from typing import Any

from autopar.model.graph import Block, OpGraph, OpNode


def saved_bytes(graph: OpGraph, blocks: tuple[Block, ...]) -> int:
    """Bytes that autograd keeps over some blocks; a storage that several operators keep counts once."""
    kept: dict[tuple[str, int], int] = {}
    for block in blocks:
        for name in block.nodes:
            for number, saved in enumerate(graph.nodes[name].saved):
                key = (saved.source, saved.output) if saved.source else (f"{name}#{number}", 0)
                kept[key] = saved.meta.nbytes
    return sum(kept.values())


def flops_by_kind(graph: OpGraph) -> dict[str, dict[str, int]]:
    """Forward and backward FLOPs of matrix products and convolutions, and of fused attention, as torch counts them.

    ``other`` is for what torch counts as free: the elements that all other operators make, at least one FLOP each. It
    is in no total.
    """
    nodes = list(graph.of_kind("op"))
    found = {
        kind: {
            "forward": sum(n.forward_flops for n in nodes if _flops_kind(n) == kind),
            "backward": sum(n.backward_flops for n in nodes if _flops_kind(n) == kind),
        }
        for kind in ("matrix", "attention")
    }
    made = [n for n in nodes if _flops_kind(n) == "other" and not n.is_view]
    return found | {"other": {"forward": sum(o.numel for n in made for o in n.outputs if o.dtype.is_floating_point)}}


def _flops_kind(node: OpNode) -> str:
    if "scaled_dot_product" in node.op:
        return "attention"
    return "matrix" if node.forward_flops else "other"


def summarize(graph: OpGraph, capture_time_s: float) -> dict[str, Any]:
    """The documented keys of ``graph --json``; FLOPs and bytes are for the captured micro-batch, ``batch_size``."""
    parameters = list(graph.of_kind("parameter"))
    return {
        "parameters": graph.parameter_count,
        "parameter_bytes": sum(p.meta.nbytes for p in parameters),
        "forward_flops": graph.forward_flops,
        "backward_flops": graph.backward_flops,
        "flops": flops_by_kind(graph),
        "saved_activation_bytes": saved_bytes(graph, graph.blocks),
        "capture_time_s": capture_time_s,
        "batch_size": graph.batch_size,
        "operators": sum(1 for _ in graph.of_kind("op")),
        "fingerprint": graph.fingerprint,
        "blocks": [_kind(graph, kind, blocks) for kind, blocks in graph.block_kinds().items()],
    }


def _kind(graph: OpGraph, kind: str, blocks: list[Block]) -> dict[str, Any]:
    """One block kind; numbers are of one block of it."""
    one = blocks[0]
    nodes = [graph.nodes[name] for name in one.nodes]
    largest = sorted(zip(nodes, one.labels, strict=True), key=lambda pair: -pair[0].forward_flops)[:3]
    return {
        "kind": kind,
        "count": len(blocks),
        "names": [block.name for block in blocks],
        "parameters": sum(graph.nodes[p].meta.numel for p in one.parameters if graph.nodes[p].kind == "parameter"),
        "forward_flops": sum(n.forward_flops for n in nodes),
        "backward_flops": sum(n.backward_flops for n in nodes),
        "saved_activation_bytes": saved_bytes(graph, (one,)),
        "largest_operators": [label for node, label in largest if node.forward_flops],
    }
