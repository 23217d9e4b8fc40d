"""Facts of one operator, found by running it alone on the meta device: FLOPs, what autograd saves, whether it is a view.

Attention is the exception: the kernel that will run depends on the device, and all fused ones (FlashAttention, Dao
et al. 2022, arXiv 2205.14135) keep query, key, value, output and one log-sum-exp per row; the meta device would show the unfused one.
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
class OperatorFacts:
    """What one call of an operator does.

    Attributes:
        saved: kept tensors: ("input", i), ("output", i), or a meta of a tensor of its own.
    """

    requires_grad: bool
    is_view: bool
    forward_flops: int
    backward_flops: int
    saved: tuple[tuple[str, int] | TensorMeta, ...]

    def saved_tensors(
        self, name: str, metas: Sequence[TensorMeta], operands: Sequence[str], nodes: dict[str, OpNode]
    ) -> tuple[Saved, ...]:
        """The saved tensors with the nodes whose storage they are; parameters and batch inputs apart."""
        found: list[Saved] = []
        for item in self.saved:
            if isinstance(item, TensorMeta):
                found.append(Saved(None, item))
                continue
            which, index = item
            if which == "output":
                found.append(Saved(name, metas[index], index))
                continue
            root = nodes[operands[index]]
            if root.alias_of is not None:
                root = nodes[root.alias_of]
            if root.kind == "op":
                found.append(Saved(root.name, root.meta))
        return tuple(dict.fromkeys(found))


def facts_of(node: fx.Node, needs_grad: Sequence[bool], known: dict[Any, OperatorFacts]) -> OperatorFacts:
    """Runs an exported operator on meta tensors like its own.

    Args:
        node: with fake values in ``meta["val"]`` of its operands.
        needs_grad: per tensor operand.
        known: facts by signature, filled as we go, so that repeated layers cost nothing.
    """
    operands: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), operands.append)
    flat, _ = pytree.tree_flatten((node.args, dict(node.kwargs)))
    key = (
        str(node.target),
        tuple(
            (tuple(v.shape), v.stride(), v.dtype) if isinstance(v := n.meta["val"], torch.Tensor) else id(n)
            for n in operands
        ),
        tuple(needs_grad),
        tuple("tensor" if isinstance(a, fx.Node) else repr(a) for a in flat),
    )
    if key not in known:
        known[key] = _run(node, operands, needs_grad)
    return known[key]


def _run(node: fx.Node, operands: list[fx.Node], needs_grad: Sequence[bool]) -> OperatorFacts:
    values = [_meta_like(n.meta["val"], grad) for n, grad in zip(operands, needs_grad, strict=True)]
    queue = iter(values)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: next(queue))
    tensors = [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]
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
    home = {
        v.untyped_storage()._cdata: ("input", i)
        for i, v in reversed(list(enumerate(values)))
        if isinstance(v, torch.Tensor)
    }
    is_view = bool(outputs) and all(v.untyped_storage()._cdata in home for v in outputs)
    if not is_view:
        home = {**{v.untyped_storage()._cdata: ("output", i) for i, v in enumerate(outputs)}, **home}
    if "scaled_dot_product_attention" in str(node.target):
        saved = _attention_saves(values, outputs[0], bool(differentiable))
    else:
        own = {t.untyped_storage()._cdata: t for t in kept}
        saved = tuple(home.get(key) or TensorMeta(tuple(t.shape), t.dtype) for key, t in own.items())
    del tensors
    return OperatorFacts(
        bool(differentiable),
        is_view,
        forward.get_total_flops(),
        backward.get_total_flops(),
        tuple(dict.fromkeys(saved)),
    )


def _meta_like(value: Any, grad: bool) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_meta_like(v, grad) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return empty.requires_grad_(grad and value.dtype.is_floating_point)


def _attention_saves(
    values: list[Any], out: torch.Tensor, differentiable: bool
) -> tuple[tuple[str, int] | TensorMeta, ...]:
    if not differentiable:
        return ()
    operands = [("input", i) for i, v in enumerate(values[:4]) if isinstance(v, torch.Tensor)]
    return (*operands, ("output", 0), TensorMeta(tuple(out.shape[:-1]), torch.float32))
