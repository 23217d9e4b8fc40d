"""Localize: the call that one device makes on its shards in place of the global operator.

Most operators run unchanged. Sizes written into a call (view, expand) are cut; a bias or a mean under a partial sum is
scaled; a vocabulary-sharded embedding or cross entropy becomes an operator of :mod:`autopar.sharding.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.model.graph import OpGraph
from autopar.sharding import ops
from autopar.sharding.placement import P, local_shape
from autopar.sharding.rules import base_name
from autopar.sharding.strategy import Strategy


@dataclass(frozen=True)
class LocalCall:
    """A call on local shards; ``args`` and ``kwargs`` hold the original fx nodes as operands.

    Attributes:
        axis: mesh axis whose process group the target takes as ``group=``, or None.
        operand_scale: (operand node, factor): multiply that operand by ``ops.scale_forward`` first.
        output_scale: multiply the result (a mean over a shard becomes its share of the whole mean).
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axis: str | None = None
    operand_scale: tuple[fx.Node, float] | None = None
    output_scale: float | None = None


_SIZED = {"view": 1, "reshape": 1, "_unsafe_view": 1, "expand": 1, "broadcast_to": 1}


def localize(graph: OpGraph, name: str, chosen: dict[str, Strategy], sizes: dict[str, int]) -> LocalCall:
    """Rewrites one operator for a device's shards.

    Args:
        graph: the captured model.
        name: the op node.
        chosen: strategy per mesh axis; axes of size 1 may be missing.
        sizes: size per mesh axis.

    Raises:
        PlanError: two axes ask for a special operator at once, or a dimension does not divide.
    """
    node, call = graph.nodes[name], graph.fx_node(name)
    active = {a: s for a, s in chosen.items() if sizes.get(a, 1) > 1 and not s.is_replicated}
    args, kwargs, op = tuple(call.args), dict(call.kwargs), base_name(node.op)
    if not active or not callable(call.target):
        return LocalCall(call.target, args, kwargs)  # type: ignore[arg-type]
    if op in _SIZED or op == "unflatten":
        shape = local_shape(node.meta.shape, [(s.output, sizes[a]) for a, s in active.items()])
        if op == "unflatten":
            return LocalCall(torch.ops.aten.reshape.default, (args[0], list(shape)), {})
        at = _SIZED[op]
        return LocalCall(call.target, (*args[:at], list(shape), *args[at + 1 :]), kwargs)
    special = [a for a, s in active.items() if _special(op, s)]
    if len(special) > 1:
        raise PlanError(
            f"operator {name!r} ({node.op}) is split by two axes at once ({', '.join(special)})",
            "Split it on one of them",
        )
    if special:
        axis = special[0]
        return LocalCall(_special(op, active[axis]), args, kwargs, axis=axis)  # type: ignore[arg-type]
    partial = [a for a, s in active.items() if s.output == P and not any(p == P for p in s.inputs)]
    scale = 1.0
    for axis in partial:
        scale /= sizes[axis]
    bias = {"linear": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2, "convolution": 2, "addmm": 0}.get(op)
    operand = args[bias] if bias is not None and len(args) > bias else kwargs.get("bias") if bias is not None else None
    if partial and isinstance(operand, fx.Node):
        return LocalCall(call.target, args, kwargs, operand_scale=(operand, scale))
    if partial and (
        op == "mean" or (op in ("mse_loss", "l1_loss", "smooth_l1_loss") and (list(args) + [1] * 3)[2] == 1)
    ):
        return LocalCall(call.target, args, kwargs, output_scale=scale)
    return LocalCall(call.target, args, kwargs)


def _special(op: str, strategy: Strategy) -> Callable[..., Any] | None:
    """The operator of :mod:`autopar.sharding.ops` that a strategy needs, if any."""
    if op == "embedding" and strategy.output == P:
        return ops.vocab_parallel_embedding
    if op == "cross_entropy_loss" and strategy.inputs[0].is_shard:
        return ops.row_parallel_cross_entropy if strategy.inputs[0].dim == 0 else ops.vocab_parallel_cross_entropy
    return None
