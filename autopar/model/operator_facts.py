"""Facts of one operator, found by running it alone on the meta device: FLOPs, layout of results, what autograd saves.

Attention is the exception: the kernel that will run depends on the device, and all fused ones (FlashAttention, Dao et
al. 2022, arXiv 2205.14135) keep query, key, value, output and one log-sum-exp per row, and lay the output out as
``[batch, length, heads, width]``; the meta device would show the unfused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autopar.model.graph import OpNode, Saved, TensorMeta


@dataclass(frozen=True)
class Strided:
    """Shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Strided:
        return Strided(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def empty(self, requires_grad: bool = False) -> torch.Tensor:
        """A meta tensor like it."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return made.requires_grad_(requires_grad and self.dtype.is_floating_point)

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype)


@dataclass(frozen=True)
class OperatorFacts:
    """What one call of an operator does.

    Attributes:
        view_of: index of the operand whose storage the results share, or None.
        saved: kept tensors: ("input", i), ("output", i), or a meta of a tensor of its own.
    """

    outputs: tuple[Strided, ...]
    requires_grad: bool
    view_of: int | None
    forward_flops: int
    backward_flops: int
    saved: tuple[tuple[str, int] | TensorMeta, ...]

    def saved_tensors(self, name: str, operands: Sequence[str], nodes: dict[str, OpNode]) -> tuple[Saved, ...]:
        """The saved tensors with the nodes whose storage they are; parameters and batch inputs apart."""
        found: list[Saved] = []
        for item in self.saved:
            if isinstance(item, TensorMeta):
                found.append(Saved(None, item))
                continue
            which, index = item
            if which == "output":
                found.append(Saved(name, self.outputs[index].meta, index))
                continue
            root = nodes[operands[index]]
            root = nodes[root.alias_of] if root.alias_of is not None else root
            if root.kind == "op" and all(s.source != root.name for s in found):
                found.append(Saved(root.name, root.meta))
        return tuple(found)


def facts_of(
    node: fx.Node, operands: Sequence[Strided], needs_grad: Sequence[bool], known: dict[Any, OperatorFacts]
) -> OperatorFacts:
    """Runs an exported operator on meta tensors.

    Args:
        node: a call_function node whose tensor operands are single tensors.
        operands: one per tensor operand, in order of appearance.
        needs_grad: per tensor operand.
        known: facts by signature, filled as we go, so that repeated layers cost nothing.
    """
    flat, _ = pytree.tree_flatten((node.args, dict(node.kwargs)))
    attributes = tuple("tensor" if isinstance(a, fx.Node) else repr(a) for a in flat)
    key = (str(node.target), tuple(operands), tuple(needs_grad), attributes)
    if key not in known:
        known[key] = _run(node, operands, needs_grad)
    return known[key]


def _run(node: fx.Node, operands: Sequence[Strided], needs_grad: Sequence[bool]) -> OperatorFacts:
    values = [one.empty(grad) for one, grad in zip(operands, needs_grad, strict=True)]
    queue = iter(values)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: next(queue))
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), FlopCounterMode(display=False) as forward:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    outputs = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    differentiable = [v for v in outputs if v.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if differentiable:
            torch.autograd.backward(differentiable, [torch.empty_like(v) for v in differentiable])
    home = {v.untyped_storage()._cdata: i for i, v in reversed(list(enumerate(values)))}
    shared = {home.get(v.untyped_storage()._cdata) for v in outputs}
    view_of = shared.pop() if len(shared) == 1 else None
    if "scaled_dot_product_attention" in str(node.target):
        laid_out: tuple[Strided, ...] = (Strided.of(_attention_output(outputs[0])),)
        saved = _attention_saves(values, outputs[0]) if differentiable else ()
    else:
        laid_out = tuple(Strided.of(v) for v in outputs)
        saved = _saved(kept, values, outputs, view_of)
    flops = forward.get_total_flops(), backward.get_total_flops()
    return OperatorFacts(laid_out, bool(differentiable), view_of, *flops, saved)


def _saved(
    kept: list[torch.Tensor], values: list[torch.Tensor], outputs: list[torch.Tensor], view_of: int | None
) -> tuple[tuple[str, int] | TensorMeta, ...]:
    """Kept storages, each once, as operands, results or tensors of the operator's own."""
    home: dict[int, tuple[str, int]] = {}
    if view_of is None:
        home.update({v.untyped_storage()._cdata: ("output", i) for i, v in enumerate(outputs)})
    home.update({v.untyped_storage()._cdata: ("input", i) for i, v in reversed(list(enumerate(values)))})
    own = {t.untyped_storage()._cdata: t for t in kept}
    return tuple(home.get(key) or TensorMeta(tuple(t.shape), t.dtype) for key, t in own.items())


def _attention_output(out: torch.Tensor) -> torch.Tensor:
    """The output as fused kernels lay it out."""
    return torch.empty_like(out.transpose(-3, -2), memory_format=torch.contiguous_format).transpose(-3, -2)


def _attention_saves(values: list[torch.Tensor], out: torch.Tensor) -> tuple[tuple[str, int] | TensorMeta, ...]:
    operands = [("input", i) for i in range(len(values[:4]))]
    return (*operands, ("output", 0), TensorMeta(tuple(out.shape[:-1]), torch.float32))
