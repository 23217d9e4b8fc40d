"""Facts of one operator, found by running it alone on the meta device: FLOPs, layout of results, what autograd saves.

The exceptions are in :mod:`autopar.model.attention_facts`, :mod:`autopar.model.bag_facts` and
:mod:`autopar.model.norm_facts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autopar.model import bag_facts, norm_facts
from autopar.model.attention_facts import dropout_of, fused_output, fused_saves, is_fused
from autopar.model.autocast import casts_of
from autopar.model.graph import OpNode, Saved, TensorMeta


def differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of this dtype carry gradients."""
    return dtype.is_floating_point or dtype.is_complex


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
        return made.requires_grad_(requires_grad and differentiable(self.dtype))

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype)


@dataclass(frozen=True)
class OperatorFacts:
    """What one call of an operator does.

    Attributes:
        views: per result, the index of the operand whose storage it shares, or None.
        saved: kept tensors: ("input", i), ("output", i), ("cast", i) of the operand as autocast turned it, or a meta of
            a tensor of its own.
        read: the operands' metas as autocast turned them; empty where it turned none.
    """

    outputs: tuple[Strided, ...]
    requires_grad: bool
    views: tuple[int | None, ...]
    forward_flops: int
    backward_flops: int
    saved: tuple[tuple[str, int] | TensorMeta, ...]
    read: tuple[TensorMeta, ...]

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
            operand = nodes[operands[index]]
            if which == "cast":  # autocast makes one copy of a trainable parameter for all its readers
                shared = operand.kind == "parameter" and operand.requires_grad
                found.append(Saved(operand.name if shared else None, self.read[index]))
                continue
            root = nodes[operand.alias_of] if operand.alias_of is not None else operand
            output = operand.alias_output
            if root.kind == "op" and all((s.source, s.output) != (root.name, output) for s in found):
                found.append(Saved(root.name, root.outputs[output], output))
        return tuple(found)


def facts_of(
    node: fx.Node,
    operands: Sequence[Strided],
    needs_grad: Sequence[bool],
    device: str,
    autocast: torch.dtype | None,
    known: dict[Any, OperatorFacts],
) -> OperatorFacts:
    """Runs an exported operator on meta tensors.

    Args:
        node: a call_function node whose tensor operands are single tensors.
        operands: one per tensor operand, in order of appearance.
        needs_grad: per tensor operand.
        device: type of the device that it will run on.
        autocast: dtype of the autocast that it will run under, if any.
        known: facts by signature, filled as we go, so that repeated layers cost nothing.
    """
    flat, _ = pytree.tree_flatten((node.args, dict(node.kwargs)))
    attributes = tuple("tensor" if isinstance(a, fx.Node) else repr(a) for a in flat)
    key = (str(node.target), tuple(operands), tuple(needs_grad), attributes)
    if key not in known:
        known[key] = _run(node, operands, needs_grad, device, autocast)
    return known[key]


def _run(
    node: fx.Node, operands: Sequence[Strided], needs_grad: Sequence[bool], device: str, autocast: torch.dtype | None
) -> OperatorFacts:
    values = [one.empty(grad) for one, grad in zip(operands, needs_grad, strict=True)]
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def call(tensors: Sequence[torch.Tensor]) -> Any:
        queue = iter(tensors)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: next(queue))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    read = values if autocast is None else _cast(values, call, device, autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), FlopCounterMode(display=False) as forward:
        result = call(read)
    outputs = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
    differentiable = [v for v in outputs if v.requires_grad]
    with FlopCounterMode(display=False) as backward:
        if differentiable:
            torch.autograd.backward(differentiable, [torch.empty_like(v) for v in differentiable])
    home = {v.untyped_storage()._cdata: i for i, v in reversed(list(enumerate(values)))}
    views = tuple(home.get(v.untyped_storage()._cdata) for v in outputs)
    attends = node.target is torch.ops.aten.scaled_dot_product_attention.default
    if attends and is_fused(read[:4], dropout_of(node.args, dict(node.kwargs)), device):
        laid_out: tuple[Strided, ...] = (Strided.of(fused_output(read[0], outputs[0])),)
        saved = fused_saves(read[:4], outputs[0]) if differentiable else ()
        cast = [a is not b for a, b in zip(values, read, strict=True)]
        saved = tuple(("cast", s[1]) if isinstance(s, tuple) and s[0] == "input" and cast[s[1]] else s for s in saved)
    else:
        laid_out = tuple(Strided.of(v) for v in outputs)
        if node.target is torch.ops.aten.embedding_bag.padding_idx and device == "cpu":
            laid_out = bag_facts.on_cpu(node.args, laid_out)
        saved = _saved(kept, values, read, outputs)
        if node.target in norm_facts.NORMS and device == "cpu":
            saved = norm_facts.on_cpu(saved, read)
    flops = forward.get_total_flops(), backward.get_total_flops()
    turned = any(a is not b for a, b in zip(values, read, strict=True))
    metas = tuple(TensorMeta(tuple(v.shape), v.dtype) for v in read) if turned else ()
    return OperatorFacts(laid_out, bool(differentiable), views, *flops, saved, metas)


def _cast(
    values: list[torch.Tensor], call: Callable[[Sequence[torch.Tensor]], Any], device: str, autocast: torch.dtype
) -> list[torch.Tensor]:
    """The operands as autocast turns them: those that give results of the dtypes that it gives.

    Casts to wider dtypes may be the operator's own. Some operators are told to compute wider instead (a sum, a softmax
    inside a loss); then the operands are widened.
    """
    dtypes, expected = casts_of(call, values, device, autocast)
    narrowed = [d if d == autocast else v.dtype for v, d in zip(values, dtypes, strict=True)]
    widened = [torch.float32 if v.dtype == autocast else v.dtype for v in values]
    for chosen in (dtypes, narrowed, widened):
        read = [v if v.dtype == dtype else v.to(dtype) for v, dtype in zip(values, chosen, strict=True)]
        try:
            with torch.no_grad():
                made = tuple(v.dtype for v in pytree.tree_leaves(call(read)) if isinstance(v, torch.Tensor))
        except RuntimeError:  # unlike dtypes
            continue
        if made == expected:
            return read
    return values


def _saved(
    kept: list[torch.Tensor], values: list[torch.Tensor], read: list[torch.Tensor], outputs: list[torch.Tensor]
) -> tuple[tuple[str, int] | TensorMeta, ...]:
    """Kept storages, each once, as operands, results or tensors of the operator's own."""
    home = {v.untyped_storage()._cdata: ("output", i) for i, v in enumerate(outputs)}
    home.update({v.untyped_storage()._cdata: ("cast", i) for i, v in reversed(list(enumerate(read)))})
    home.update({v.untyped_storage()._cdata: ("input", i) for i, v in reversed(list(enumerate(values)))})
    own = {t.untyped_storage()._cdata: t for t in kept}
    return tuple(home.get(key) or _storage(t) for key, t in own.items())


def _storage(tensor: torch.Tensor) -> TensorMeta:
    """A kept tensor; the whole of its storage where it is a view of more, or repeats less."""
    nbytes = tensor.untyped_storage().nbytes()
    whole = nbytes == tensor.numel() * tensor.itemsize
    return TensorMeta(tuple(tensor.shape) if whole else (nbytes // tensor.itemsize,), tensor.dtype)
