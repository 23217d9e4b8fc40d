"""OpGraph: the captured model, operator by operator, and its chain of blocks.

One OpGraph is one training micro-batch: inputs in, scalar loss out. It wraps a ``torch.fx.Graph`` (what the runtime
lowers) with the facts that the cost engine and the search read. Every shape is the global, unsharded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

NodeKind = Literal["input", "parameter", "buffer", "constant", "op"]


@dataclass(frozen=True)
class TensorMeta:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Saved:
    """One tensor that autograd keeps from an operator's forward to its backward.

    Attributes:
        source: name of the node whose output (storage) is kept, or None for a tensor that only the operator itself
            knows (log-sum-exp of attention, mean and rstd of a norm, a dropout mask).
        output: which output of ``source`` (0 unless it has several).
        meta: shape and dtype of what is kept.
    """

    source: str | None
    meta: TensorMeta
    output: int = 0


@dataclass(frozen=True)
class OpNode:
    """One node of the graph.

    Attributes:
        name: unique; equal to the name of the ``fx.Node``.
        kind: input | parameter | buffer | constant | op.
        op: the ATen overload, such as ``aten.linear.default``; for other kinds the batch key or state_dict name.
        inputs: names of the producers of its tensor operands, in order of appearance in args then kwargs
            (a producer that appears twice is listed twice).
        outputs: metas of its tensor outputs.
        module: path of the nn.Module that called it (``blocks.0.attn.q``), "" at the top.
        source: ``file:line`` of the user's code.
        requires_grad: whether its (floating) output carries gradient.
        alias_of: the node whose storage it shares (views), or None.
        alias_output: which output of that node.
        forward_flops, backward_flops: as torch.utils.flop_counter counts (a multiply-add is 2).
        saved: what autograd keeps for this node's backward; deduplicate by (source, output) over a block. A parameter
            is the source of the copy that autocast makes of it.
        reads: aligned with ``inputs``, the operands as autocast turns them; empty where none is turned.
    """

    name: str
    kind: NodeKind
    op: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    module: str = ""
    source: str = ""
    requires_grad: bool = False
    alias_of: str | None = None
    alias_output: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    saved: tuple[Saved, ...] = ()
    reads: tuple[TensorMeta, ...] = ()

    @property
    def meta(self) -> TensorMeta:
        return self.outputs[0]

    @property
    def is_view(self) -> bool:
        return self.alias_of is not None


@dataclass(frozen=True)
class Block:
    """A contiguous run of operators; the model is a chain of blocks, and stages are cut between blocks.

    Attributes:
        name: a module path where the block is one (``blocks.3``), else a path-like unique name (``head``).
        kind: blocks of one kind are the same in structure: same operators, shapes and attributes, position by position.
        nodes: the op nodes, in topological order.
        labels: aligned with ``nodes``; a name for each that is the same in every block of this kind
            (``attn.q.linear``); plans use it.
        inputs: activations made by earlier blocks (or batch inputs) that this block reads, in a fixed order that
            is aligned between blocks of a kind.
        outputs: activations that later blocks (or the loss) read, aligned likewise.
        parameters: parameter and buffer node names that it reads, in order of first use, aligned likewise.
        prelude: cheap gradient-free nodes (positions, masks, rotary tables), computed from batch inputs, buffers and
            constants alone, that this block needs but that an earlier block also computes; they are recomputed here
            rather than sent. Topological order. Empty when the nodes are the block's own.
    """

    name: str
    kind: str
    nodes: tuple[str, ...]
    labels: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    prelude: tuple[str, ...] = ()

    def label_of(self) -> dict[str, str]:
        """Node name to label."""
        return dict(zip(self.nodes, self.labels, strict=True))


@dataclass(frozen=True)
class OpGraph:
    """A captured model at one micro-batch size.

    Attributes:
        fx_graph: placeholders are the batch inputs (by batch key); parameters, buffers and constants are ``get_attr``
            nodes whose target is the state_dict name (constants: ``_constant_N``); one output, the scalar loss.
        nodes: every node by name, in topological order.
        blocks: the chain; every op node is in exactly one block.
        batch_size: number of samples of the captured micro-batch.
        tokens_per_sample: labels or positions per sample (1 for models without a sequence), for tokens/s.
        loss: name of the node that makes the scalar loss.
        tied: canonical parameter name -> its other names in the state_dict.
        constants: tensors of ``_constant_N`` nodes.
        fingerprint: hash of structure, shapes and parameter names at batch-independent level; equal for every
            batch size of one model.
    """

    fx_graph: fx.Graph
    nodes: dict[str, OpNode]
    blocks: tuple[Block, ...]
    batch_size: int
    tokens_per_sample: int
    loss: str
    fingerprint: str
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def of_kind(self, kind: NodeKind) -> Iterator[OpNode]:
        return (n for n in self.nodes.values() if n.kind == kind)

    @property
    def parameter_count(self) -> int:
        return sum(n.meta.numel for n in self.of_kind("parameter"))

    @property
    def forward_flops(self) -> int:
        return sum(n.forward_flops for n in self.nodes.values())

    @property
    def backward_flops(self) -> int:
        return sum(n.backward_flops for n in self.nodes.values())

    def block_kinds(self) -> dict[str, list[Block]]:
        """Blocks by kind, in order of first appearance."""
        kinds: dict[str, list[Block]] = {}
        for block in self.blocks:
            kinds.setdefault(block.kind, []).append(block)
        return kinds

    def fx_node(self, name: str) -> fx.Node:
        """The fx node behind a name."""
        if "fx" not in self.facts:
            self.facts["fx"] = {n.name: n for n in self.fx_graph.nodes}
        table: dict[str, fx.Node] = self.facts["fx"]
        return table[name]
