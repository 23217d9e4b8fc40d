"""Grouped matrix product over experts: the operator that keeps a mixture of experts static in shape.

Dropless routing (Gale et al. 2022, MegaBlocks, arXiv 2211.15841) sorts the ``tokens * top_k`` routed rows by expert;
how many rows each expert has depends on the data, how many there are together does not. FLOPs are therefore exact for
the sum over experts. Planning one expert's or one expert-parallel rank's share assumes balance: equal rows per expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("autopar::grouped_mm", mutates_args=())
def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each group of rows times its own matrix.

    Args:
        rows: [rows, in], sorted by group.
        weights: [groups, in, out].
        ends: [groups] int32; where each group ends. Rows after the last end give zeros.

    Returns:
        [rows, out].
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weights, offs=ends)
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            out[begin:end] = rows[begin:end] @ weights[group]
        begin = end
    return out


@grouped_mm.register_fake
def _(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@torch.library.custom_op("autopar::grouped_outer", mutates_args=())
def grouped_outer(rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Gradient of :func:`grouped_mm` for its weights: per group, rows transposed times gradient.

    Args:
        rows: [rows, in].
        gradient: [rows, out].
        ends: [groups] int32.

    Returns:
        [groups, in, out].
    """
    out = rows.new_zeros(ends.shape[0], rows.shape[1], gradient.shape[1])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            torch.mm(rows[begin:end].t(), gradient[begin:end], out=out[group])
        begin = end
    return out


@grouped_outer.register_fake
def _(rows: torch.Tensor, gradient: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(ends.shape[0], rows.shape[1], gradient.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    rows, weights, ends = inputs
    keep_rows, keep_weights = ctx.needs_input_grad[1], ctx.needs_input_grad[0]
    ctx.save_for_backward(rows if keep_rows else None, weights if keep_weights else None, ends)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    for_rows = None if weights is None else grouped_mm(gradient, weights.transpose(1, 2), ends)
    for_weights = None if rows is None else grouped_outer(rows, gradient, ends)
    return for_rows, for_weights, None


grouped_mm.register_autograd(_backward, setup_context=_keep)
for _device in ("cpu", "cuda"):  # as other products; bf16 also under fp16, which torch's own kernel does not take
    grouped_mm.register_autocast(_device, torch.bfloat16)


@register_flop_formula(torch.ops.autopar.grouped_mm)
def _product_flops(rows: Any, weights: Any, ends: Any, *, out_shape: Any = None, **_: Any) -> int:
    """2 x rows x in x out: every routed row meets one expert."""
    return 2 * int(rows[0]) * int(weights[1]) * int(weights[2])


@register_flop_formula(torch.ops.autopar.grouped_outer)
def _outer_flops(rows: Any, gradient: Any, ends: Any, *, out_shape: Any = None, **_: Any) -> int:
    """2 x rows x in x out."""
    return 2 * int(rows[0]) * int(rows[1]) * int(gradient[1])
