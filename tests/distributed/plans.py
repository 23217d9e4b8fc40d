"""Hand-made plans: any mesh, with Megatron-style or replicated layouts."""

from __future__ import annotations

from typing import Any

from autopar.model.graph import Block, OpGraph
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan


def megatron_layout(graph: OpGraph, block: Block, sequence_sharded: bool = False) -> Layout:
    """Column- then row-parallel linears, heads sharded between; vocabulary-parallel embedding, head and loss.

    Works on zoo-GPT-like blocks: a linear named q, k, v, up or head is column-parallel, out and down row-parallel.
    """
    ops: dict[str, dict[str, str]] = {}
    for name, label in zip(block.nodes, block.labels, strict=True):
        node, last = graph.nodes[name], graph.nodes[name].module.rpartition(".")[2]
        rank = len(node.meta.shape)
        kind = label.split(".")[-1].split("_")[0]
        bias = " S(0)" if len(node.inputs) == 3 else ""
        text = ""
        if kind == "linear" and last in ("q", "k", "v", "up", "head"):
            text = f"R S(0){bias} -> S({rank - 1})"
        elif kind == "linear" and last in ("out", "down"):
            text = f"S({rank - 1}) S(1){bias and ' R'} -> P"
        elif kind == "view":
            text = "S(2) -> S(2)"
        elif kind == "transpose":
            text = "S(2) -> S(1)" if name in _before_attention(graph, block) else "S(1) -> S(2)"
        elif kind == "reshape":
            text = "S(2) -> S(2)"
        elif kind == "scaled":
            text = "S(1) S(1) S(1) -> S(1)"
        elif (kind == "dropout" and last == "inner") or kind == "gelu":
            text = "S(2) -> S(2)"
        elif kind == "embedding" and last == "tokens":
            text = "S(0) R -> P"
        elif kind == "flatten" and rank == 2:
            text = "S(2) -> S(1)"
        elif kind == "cross":
            text = "S(1) R -> R"
        elif sequence_sharded and kind == "layer":
            text = "S(1) R R -> S(1)"
        elif sequence_sharded and kind == "add" and block.name not in ("embed", "head"):
            text = "S(1) S(1) -> S(1)"
        if text:
            ops[label] = {"tp": text}
    placed = {"tp": "S(1)"} if sequence_sharded else {}
    ends = [{} if graph.nodes[n].kind == "input" or n == graph.loss else placed for n in block.inputs]
    outs = [{} if n == graph.loss else placed for n in block.outputs]
    return Layout(operators=ops, inputs=ends, outputs=outs)


def _before_attention(graph: OpGraph, block: Block) -> set[str]:
    at = next((i for i, n in enumerate(block.nodes) if "attention" in graph.nodes[n].op), 0)
    return set(block.nodes[:at])


def make_plan(graph: OpGraph, mesh: dict[str, int], micro_batch: int, micro_batches: int, **more: Any) -> Plan:
    """A plan with evenly cut stages; tp above 1 uses :func:`megatron_layout`."""
    shape = Mesh(**mesh)
    sequence = more.pop("sequence_sharded", False)
    recompute = more.pop("recompute", "none")
    layouts = {b.kind: megatron_layout(graph, b, sequence) if shape.tp > 1 else Layout() for b in graph.blocks}
    count = shape.pp * more.get("virtual_stages", 1)
    names = [b.name for b in graph.blocks]
    stages = [names[i * len(names) // count] for i in range(count)]
    return Plan(
        model=ModelRef(source="", fingerprint=graph.fingerprint),
        cluster=ClusterRef(name="test", devices=shape.devices),
        global_batch=micro_batch * micro_batches * shape.dp,
        mesh=shape,
        stages=stages,
        blocks=[BlockPlan(name=b.name, layout=b.kind, recompute=recompute) for b in graph.blocks],
        layouts=layouts,
        zero_stage=3 if shape.dp_shard > 1 else 0,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        **more,
    )
