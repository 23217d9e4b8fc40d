"""What one ATen operator does: its matrix products, its attention, the memory it moves; from local shapes alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.hardware.efficiency import AttentionShape, MatmulShape
from autopar.model.graph import TensorMeta

VIEWS = frozenset(
    "view reshape transpose permute expand unsqueeze squeeze slice select split split_with_sizes chunk t detach alias "
    "unbind flatten unflatten getitem narrow movedim swapaxes expand_as view_as _unsafe_view numpy_T mT "
    "sym_size lift_fresh_copy diagonal _assert_tensor_metadata tensor_split unsafe_split unsafe_chunk".split()
)
PARTS = frozenset("slice select split split_with_sizes chunk unbind narrow tensor_split unsafe_split".split())
PRODUCTS = frozenset("linear mm addmm bmm baddbmm matmul convolution conv1d conv2d conv3d _grouped_mm".split())
NORMS = frozenset(
    "layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm native_group_norm batch_norm "
    "_native_batch_norm_legit softmax _softmax log_softmax _log_softmax".split()
)
LOSSES = frozenset("cross_entropy_loss nll_loss nll_loss_forward nll_loss_nd".split())
REDUCTIONS = frozenset("sum mean amax amin max min var var_mean norm logsumexp any all cumsum argmax".split())
GATHERS = frozenset(
    "embedding index index_select gather scatter scatter_add index_add index_put topk sort argsort bincount "
    "index_copy nonzero masked_select repeat_interleave one_hot histc take_along_dim roll".split()
)
CREATIONS = frozenset("zeros ones full arange empty zeros_like ones_like full_like scalar_tensor eye tril triu".split())
LINEAR = frozenset("add sub neg cat stack add_ contiguous clone mul_scalar".split())  # backward needs no saved operand
TRANSCENDENTAL = frozenset("gelu silu tanh exp sigmoid erf sin cos log pow softplus mish elu".split())
SDPA = "scaled_dot_product"


@dataclass(frozen=True)
class Work:
    """What an operator does in one direction.

    Attributes:
        products: matrix products, in order.
        attention: fused attention, or None; ``attention_bytes`` is its least memory traffic.
        traffic: (class of memory-bound work, bytes read and written) pairs; see ``Device.memory_efficiency``.
        is_free: a view: no device time at all.
    """

    direction: str
    products: tuple[MatmulShape, ...] = ()
    attention: AttentionShape | None = None
    attention_bytes: float = 0.0
    traffic: tuple[tuple[str, float], ...] = ()

    @property
    def flops(self) -> float:
        """Of products and attention, forward."""
        attention = self.attention.forward_flops if self.attention else 0.0
        return sum(product.flops for product in self.products) + attention

    @property
    def is_free(self) -> bool:
        return not self.products and self.attention is None and not self.traffic


def base_name(op: str) -> str:
    """``aten.linear.default`` to ``linear``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def is_pointwise(op: str) -> bool:
    """Whether a compiler may fuse the operator into its neighbours: element by element, no product, no gather."""
    name = base_name(op)
    named = VIEWS | PRODUCTS | NORMS | LOSSES | REDUCTIONS | GATHERS | CREATIONS
    return name not in named and SDPA not in name


def attributes_of(node: fx.Node) -> str:
    """The arguments of a node that are no tensors, by name: ``"dropout_p=0.0, is_causal=True"``."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    pairs = []
    for index, value in enumerate(node.args):
        if not _holds_nodes(value):
            pairs.append((names[index] if index < len(names) else str(index), value))
    pairs.extend((k, v) for k, v in node.kwargs.items() if not _holds_nodes(v))
    return ", ".join(f"{k}={v}" for k, v in pairs)


def _holds_nodes(value: object) -> bool:
    if isinstance(value, list | tuple):
        return any(_holds_nodes(v) for v in value)
    return isinstance(value, fx.Node)


def work_of(
    op: str,
    inputs: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta],
    flops: float,
    direction: str,
    attributes: str = "",
) -> Work:
    """The work of one operator.

    Args:
        op: ATen overload.
        inputs, outputs: local metas.
        flops: local FLOPs of this direction.
        direction: ``forward`` or ``backward``.
        attributes: as :func:`attributes_of` gives, for what shapes do not tell (``is_causal``).
    """
    name = base_name(op)
    if SDPA in name:
        return _attention(inputs, outputs, direction, attributes)
    if name in PRODUCTS:
        return _products(name, inputs, outputs, flops, direction)
    if direction == "forward":
        return Work(direction, traffic=_forward_traffic(name, inputs, outputs))
    return Work(direction, traffic=_backward_traffic(name, inputs, outputs))


def _bytes(metas: Sequence[TensorMeta]) -> float:
    return float(sum(m.nbytes for m in metas))


def _floating(metas: Sequence[TensorMeta]) -> list[TensorMeta]:
    return [m for m in metas if m.dtype.is_floating_point]


def _forward_traffic(
    name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]
) -> tuple[tuple[str, float], ...]:
    moved = _bytes(inputs) + _bytes(outputs)
    if name in VIEWS or not outputs:
        return ()
    if name == "embedding":  # touches the looked-up rows, not the table
        return (("gather", 2 * _bytes(outputs)),)
    if name in LOSSES:  # reads the logits, writes their log-softmax
        return (("cross_entropy", 2 * _bytes(inputs[:1])),)
    if name in NORMS or name in REDUCTIONS:
        return (("reduction", moved),)
    if name in GATHERS:
        return (("gather", min(moved, _bytes(inputs[1:]) + 2 * _bytes(outputs))),)
    if name in CREATIONS:
        return (("pointwise", _bytes(outputs)),)
    return (("transcendental" if name in TRANSCENDENTAL else "pointwise", moved),)


def _backward_traffic(
    name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]
) -> tuple[tuple[str, float], ...]:
    operands, grad = _bytes(_floating(inputs)), _bytes(_floating(outputs))
    if name in PARTS:  # the parts' gradients are copied into one
        return (("copy", grad + operands),)
    if name in VIEWS or name in CREATIONS or not operands:
        return ()
    if name == "embedding":  # a zeroed table, then rows added into it
        return (("gather", 2 * grad), ("pointwise", _bytes(inputs[:1])))
    if name in LOSSES:  # one-hot gradient written, then softmax gradient: two reads, one write
        return (("cross_entropy", 4 * _bytes(inputs[:1])),)
    if name in NORMS:  # reads gradient and operand, writes the operand's gradient
        return (("reduction", grad + 2 * operands),)
    if name in REDUCTIONS:
        return (("reduction", grad + operands),)
    if name in GATHERS:
        return (("gather", 2 * grad + operands),)
    if name in LINEAR:
        return ()
    return (("transcendental" if name in TRANSCENDENTAL else "pointwise", grad + 2 * operands),)


def _attention(inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta], direction: str, attributes: str) -> Work:
    q, k, v = (m.shape for m in inputs[:3])
    shape = AttentionShape(
        batch=math.prod(q[:-3]),
        heads=q[-3],
        queries=q[-2],
        keys=k[-2],
        qk_dim=q[-1],
        v_dim=v[-1],
        causal="is_causal=True" in attributes,
    )
    moved = _bytes(inputs[:3]) + _bytes(outputs[:1])
    return Work(direction, attention=shape, attention_bytes=moved * (1 if direction == "forward" else 2))


def _products(
    name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta], flops: float, direction: str
) -> Work:
    forward = _product_shape(name, inputs, outputs)
    bias = _bias_bytes(name, inputs, outputs)
    if direction == "forward":
        return Work(direction, products=(forward,))
    m, n, k = forward.m, forward.n, forward.k
    to_input = MatmulShape(m, k, n, forward.batch, "NN", forward.grouped)
    to_weight = MatmulShape(n, k, m, forward.batch, "NT", forward.grouped)
    wanted = round(flops / forward.flops) if flops and forward.flops else 2
    products = (to_input, to_weight) if wanted >= 2 else (to_weight,)
    return Work(direction, products=products, traffic=(("reduction", bias),) if bias else ())


def _bias_bytes(name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> float:
    """The gradient of a bias reads the gradient of the output once."""
    has_bias = (name in ("linear", "convolution", "conv1d", "conv2d", "conv3d") and len(inputs) > 2) or name in (
        "addmm",
        "baddbmm",
    )
    return _bytes(outputs[:1]) if has_bias else 0.0


def _product_shape(name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> MatmulShape:
    out = outputs[0].shape
    operands = [m.shape for m in inputs]
    if name in ("addmm", "baddbmm"):
        operands = operands[1:]
    a, b = operands[0], operands[1]
    if name.startswith("conv"):
        channels = out[1]
        return MatmulShape(math.prod(out) // max(1, channels), channels, max(1, math.prod(b) // max(1, b[0])))
    if name == "_grouped_mm":
        groups = b[0] if len(b) == 3 else 1
        return MatmulShape(max(1, a[-2] // groups), out[-1], a[-1], groups, grouped=True)
    k = a[-1]
    if name == "linear" or len(b) <= 2:  # leading dimensions fold into the rows
        n = out[-1] if len(b) == 2 else 1
        return MatmulShape(math.prod(out) // max(1, n), n, k)
    m = a[-2] if len(a) > 1 else 1
    n = b[-1]
    return MatmulShape(m, n, k, max(1, math.prod(out) // max(1, m * n)), layout="NN")


def narrow(meta: TensorMeta, precision: str) -> TensorMeta:
    """The tensor as the plan's precision keeps it: floating tensors at most that wide.

    Under fp8 only operands of products are narrowed to a byte, within the product; tensors stay bf16.
    """
    target = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(precision)
    if target is None or not meta.dtype.is_floating_point or meta.dtype.itemsize <= target.itemsize:
        return meta
    return TensorMeta(meta.shape, target)
