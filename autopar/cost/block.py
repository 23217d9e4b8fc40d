"""What one block costs on one device: time forward and backward, and the memory it keeps.

Read from :class:`autopar.sharding.resolve.ResolvedBlock`, the same description that the runtime executes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from autopar.cost.operators import PRODUCTS, base_name
from autopar.model.graph import OpGraph, OpNode, Saved, TensorMeta
from autopar.sharding.placement import Placement, local_shape, shard_factor
from autopar.sharding.resolve import OUTPUT, Edge, ResolvedBlock


@dataclass(frozen=True)
class Collective:
    """One collective that runs on a mesh axis for each micro-batch.

    Attributes:
        nbytes: of the tensor when whole on this axis (see :mod:`autopar.cost.communication`).
        direction: ``forward`` or ``backward``.
    """

    kind: str
    axis: str
    nbytes: int
    direction: str


@dataclass(frozen=True)
class BlockCost:
    """Costs of one block for one micro-batch on one device.

    Attributes:
        forward_s, backward_s: computing, without collectives and without recomputation.
        communication_s: (axis, direction) -> seconds of its collectives.
        saved_bytes: activations kept from forward to backward, block inputs apart.
        saved_input_bytes: aligned with ``block.inputs``: local bytes where an operator keeps the input, else 0.
        input_bytes, output_bytes: local bytes of the boundary activations; none for batch inputs, which stay anyway.
        saved_outputs: aligned with ``block.outputs``: whether ``saved_bytes`` already counts that output.
        parameter_elements: aligned with ``block.parameters``: local elements of trainable parameters, else 0.
        frozen_bytes: local bytes of frozen parameters, buffers and constants.
        step_reduction_bytes: axis -> local gradient bytes summed over it once per step.
        workspace_bytes: the largest operator's operands, results and gradients, while it runs.
        collectives: everything that runs per micro-batch.
        weight_s: the part of ``backward_s`` that gives gradients of parameters.
        recompute_s, recompute_bytes: forward time and kept bytes of what selective recomputation makes again.
        replay_s, replay_communication_s: compute, and collectives by axis, of running the forward again in full
            recomputation.
        weights: local elements of each matrix that products read; grouped ones count one of the group.
        expert: aligned with ``block.parameters``: weights of routed experts, which expert-parallel ranks hold apart.
    """

    forward_s: float
    backward_s: float
    communication_s: dict[tuple[str, str], float]
    saved_bytes: int
    saved_input_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    saved_outputs: tuple[bool, ...]
    parameter_elements: tuple[int, ...]
    frozen_bytes: int
    step_reduction_bytes: dict[str, int]
    workspace_bytes: int
    collectives: tuple[Collective, ...]
    weight_s: float = 0.0
    recompute_s: float = 0.0
    recompute_bytes: int = 0
    expert: tuple[bool, ...] = ()
    weights: tuple[int, ...] = ()
    replay_s: float = 0.0
    replay_communication_s: dict[str, float] = field(default_factory=dict)

    def communication(self, direction: str) -> float:
        """Seconds of collectives in one direction, over all axes."""
        return sum(seconds for (_, way), seconds in self.communication_s.items() if way == direction)


def collectives_of(graph: OpGraph, resolved: ResolvedBlock) -> tuple[Collective, ...]:
    """Every collective that the runtime starts for one micro-batch of a block."""
    found: list[Collective] = []
    for edge in resolved.edges:
        item = graph.nodes[edge.producer].meta.dtype.itemsize if graph.nodes[edge.producer].outputs else 0
        for step in edge.steps:
            size = item * math.prod(step.shape)
            for kind, direction in ((step.conversion.forward, "forward"), (step.conversion.backward, "backward")):
                if kind:
                    found.append(Collective(kind, step.axis, size, direction))
    for chosen in resolved.strategies.values():
        for axis, strategy in chosen.items():
            found.extend(
                Collective(one.kind, axis, one.itemsize * math.prod(one.shape), one.direction)
                for one in strategy.internal
            )
    return tuple(found)


def placement_at(resolved: ResolvedBlock, edge: Edge) -> dict[str, Placement]:
    """Placement per axis of a tensor as an edge's consumers read it."""
    placed = dict(resolved.placement_of(edge.producer))
    placed.update({step.axis: step.conversion.dst for step in edge.steps})
    return placed


def saved_of(
    graph: OpGraph,
    resolved: ResolvedBlock,
    dropped: frozenset[str] = frozenset(),
    fused: frozenset[str] = frozenset(),
    fused_norms: bool = False,
    regathers: bool = False,
    narrow_products: bool = False,
) -> dict[tuple[str, str], int]:
    """Local bytes that autograd keeps, by (storage, placement); the same storage under one placement counts once.

    Args:
        dropped: operators whose own saved tensors are made again in backward.
        fused: pointwise operators inside fused kernels; what they make for each other is not kept.
        fused_norms: norms keep their operand and the statistics alone.
        narrow_products: products keep their operands in one byte an element (fp8), apart from others' copies.
        regathers: operands are kept as they are before they are gathered.
    """
    kept: dict[tuple[str, str], int] = {}
    for name in resolved.block.nodes:
        node = graph.nodes[name]
        if name in dropped:
            continue
        saved_here = _norm_saves(graph, node) if fused_norms and "rms_norm" in node.op else node.saved
        for number, saved in enumerate(saved_here):
            if name in fused and saved.source in fused:
                continue
            if saved.source is None or saved.source == name:
                placed = {a: s.output for a, s in resolved.strategies[name].items()}
                split = [(p, resolved.sizes[a]) for a, p in placed.items() if p.is_shard]
                key = (f"{name}#{number}" if saved.source is None else f"{name}.{saved.output}", _text(placed))
            else:
                placed = _read_as(graph, resolved, node, saved.source, regathers)
                split = [(p, resolved.sizes[a]) for a, p in placed.items()]
                key = (f"{saved.source}.{saved.output}", _text(placed))
            nbytes = saved.meta.nbytes
            if narrow_products and base_name(node.op) in PRODUCTS and saved.meta.dtype.itemsize == 2:
                key, nbytes = (key[0] + "#fp8", key[1]), nbytes // 2
            kept[key] = -(-nbytes // shard_factor(split))
    return kept


def _norm_saves(graph: OpGraph, node: OpNode) -> tuple[Saved, ...]:
    """A fused norm: its operand, and one fp32 number per row."""
    root = graph.nodes[node.inputs[0]]
    root = graph.nodes[root.alias_of] if root.alias_of is not None else root
    rows = Saved(None, TensorMeta((*node.meta.shape[:-1], 1), torch.float32))
    return (Saved(root.name, root.meta), rows) if root.kind == "op" else (rows,)


def _read_as(
    graph: OpGraph, resolved: ResolvedBlock, node: OpNode, source: str, regathers: bool
) -> dict[str, Placement]:
    """How a node reads the operand whose storage is ``source``; sharded dimensions are those of the operand."""
    for i, operand in enumerate(node.inputs):
        if operand == source or graph.nodes[operand].alias_of == source:
            edge = resolved.edge_into(node.name, i)
            gathered = edge.steps and all(step.conversion.forward == "all_gather" for step in edge.steps)
            return resolved.placement_of(edge.producer) if regathers and gathered else placement_at(resolved, edge)
    return {}


def _text(placed: dict[str, Placement]) -> str:
    """Placements in a form that does not depend on how views renumber dimensions."""
    return " ".join(f"{axis}:{p.kind}" for axis, p in sorted(placed.items()))


def local_bytes(graph: OpGraph, resolved: ResolvedBlock, name: str, placed: dict[str, Placement]) -> int:
    """Bytes of one device's part of a node's first result."""
    meta = graph.nodes[name].meta
    split = [(p, resolved.sizes[a]) for a, p in placed.items()]
    return math.prod(local_shape(meta.shape, split)) * meta.dtype.itemsize


def boundary_bytes(graph: OpGraph, resolved: ResolvedBlock) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local bytes of a block's inputs and outputs."""
    block = resolved.block
    ins = zip(block.inputs, resolved.input_placements, strict=True)
    outs = zip(block.outputs, resolved.output_placements, strict=True)
    return (
        tuple(
            0 if graph.nodes[name].kind == "input" else local_bytes(graph, resolved, name, placed)
            for name, placed in ins
        ),
        tuple(local_bytes(graph, resolved, name, placed) for name, placed in outs),
    )


def workspace_of(graph: OpGraph, resolved: ResolvedBlock) -> int:
    """Bytes of the largest operator's results twice over: the result and its gradient live together in backward."""
    largest = 0
    for name in resolved.block.nodes:
        node = graph.nodes[name]
        if node.is_view:
            continue
        split = [(p, resolved.sizes[a]) for a, p in resolved.placement_of(name).items()]
        largest = max(largest, sum(math.prod(local_shape(m.shape, split)) * m.dtype.itemsize for m in node.outputs))
    return 2 * largest


def saved_outputs_of(graph: OpGraph, resolved: ResolvedBlock, kept: dict[tuple[str, str], int]) -> tuple[bool, ...]:
    """For each output, whether its storage is among what the block keeps, under the placement it leaves with."""
    flags = []
    for i, name in enumerate(resolved.block.outputs):
        edge = resolved.edge_into(OUTPUT, i)
        root = graph.nodes[name].alias_of or name
        flags.append((f"{root}.0", _text(placement_at(resolved, edge))) in kept)
    return tuple(flags)
