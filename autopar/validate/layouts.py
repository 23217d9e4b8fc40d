"""Tensor-parallel layouts as Megatron-LM lays transformers out, found operator by operator.

Weights are placed first (column- or row-parallel; Shoeybi et al. 2019, arXiv 1909.08053, section 3), then every
operator takes the legal strategy that moves the fewest bytes. With sequence parallelism (Korthikanti et al. 2022,
arXiv 2205.05198, section 4.2) activations between blocks are cut along the sequence.
"""

from __future__ import annotations

import math

from autopar.model.graph import Block, OpGraph, OpNode
from autopar.plan import Layout
from autopar.sharding.placement import Placement, R, S
from autopar.sharding.resolve import parameter_label
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy

AXIS = "tp"
ROW_PARALLEL = ("out", "down")  # modules whose products sum over the tensor-parallel ranks


def tensor_parallel_layout(graph: OpGraph, block: Block, size: int, sequence: bool) -> Layout:
    """The layout of one block on the tensor-parallel axis.

    Args:
        size: tensor-parallel ranks.
        sequence: cut the activations between blocks along dimension 1.
    """
    if size == 1:
        return Layout()
    weights = {name: _weight(graph.nodes[name], size) for name in block.parameters}
    placed: dict[str, Placement] = dict(weights)
    for name in block.inputs:
        placed[name] = _boundary(graph.nodes[name], size, sequence)
    labels = block.label_of()
    operators: dict[str, dict[str, str]] = {}
    for name in (*block.prelude, *block.nodes):
        node = graph.nodes[name]
        legal = strategies(graph, node, size)
        chosen = min(legal, key=lambda s: _moved(graph, node, s, placed, weights, sequence))
        placed[name] = chosen.output
        if name in labels and not chosen.is_replicated:
            operators[labels[name]] = {AXIS: str(chosen)}
    return Layout(
        operators=operators,
        parameters={parameter_label(block, graph.nodes[n]): {AXIS: str(p)} for n, p in weights.items() if p != R},
        inputs=[_text(_boundary(graph.nodes[n], size, sequence)) for n in block.inputs],
        outputs=[_text(_boundary(graph.nodes[n], size, sequence)) for n in block.outputs],
    )


def _text(placement: Placement) -> dict[str, str]:
    return {} if placement == R else {AXIS: str(placement)}


def _weight(node: OpNode, size: int) -> Placement:
    """Vocabulary and column-parallel weights are cut along their rows, row-parallel ones along their columns."""
    if node.kind != "parameter":
        return R
    parts, shape = node.op.split("."), node.meta.shape
    owner, is_bias = parts[-2] if len(parts) > 1 else "", parts[-1] == "bias"
    if owner == "positions" or "norm" in node.op.rsplit(".", 1)[0].split(".")[-1]:
        return R
    if owner in ROW_PARALLEL:
        return R if is_bias else S(1)
    return S(0) if shape[0] % size == 0 else R


def _boundary(node: OpNode, size: int, sequence: bool) -> Placement:
    """Activations ``[batch, length, hidden]`` between blocks."""
    shape = node.meta.shape if node.outputs else ()
    cut = sequence and node.kind == "op" and len(shape) == 3 and shape[1] % size == 0
    return S(1) if cut else R


def _moved(
    graph: OpGraph,
    node: OpNode,
    strategy: Strategy,
    placed: dict[str, Placement],
    weights: dict[str, Placement],
    sequence: bool,
) -> float:
    """Bytes that the operands move to suit a strategy; a replicated result breaks ties to the bad."""
    total = 0.0
    for wanted, name in zip(strategy.inputs, node.inputs, strict=True):
        source, operand = placed.get(name, R), graph.nodes[name]
        if wanted == source:
            continue
        if name in weights and weights[name] != R:
            return math.inf
        nbytes = float(operand.meta.nbytes) if operand.outputs else 0.0
        if source == R:
            if wanted.kind == "P":
                return math.inf
            free = operand.kind != "op" or sequence  # else devices would compute apart what they all hold
            total += (0.1 if free else 4.0) * nbytes
        else:
            total += nbytes * (2.0 if source.kind == "P" and wanted == R else 1.0)
    return total + (1.0 if strategy.output == R else 0.5 if strategy.output.kind == "P" else 0.0)
