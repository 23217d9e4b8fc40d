"""Local operators with a collective inside: what a sharded embedding, cross entropy or bias runs on each device.

Sources: vocabulary-parallel embedding and cross entropy as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053,
section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def scale_forward(x: torch.Tensor, factor: float) -> torch.Tensor:
    """``x * factor`` forward, gradient unchanged backward: a bias that is added once over the devices of a sum."""
    return _ScaleForward.apply(x, factor)  # type: ignore[no-any-return, no-untyped-call]


class _ScaleForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def vocab_parallel_embedding(
    weight: torch.Tensor, index: torch.Tensor, padding_idx: int = -1, *args: Any, group: dist.ProcessGroup
) -> torch.Tensor:
    """Rows of a vocabulary-sharded table; rows of other devices are zero, so the result is a partial sum.

    Args:
        weight: ``[vocab / devices, width]``, this device's rows.
        index: global indices, any shape.
    """
    start = dist.get_rank(group) * weight.shape[0]
    local = index - start
    outside = (local < 0) | (local >= weight.shape[0])
    own_padding = padding_idx - start if 0 <= padding_idx - start < weight.shape[0] else -1
    rows = torch.ops.aten.embedding.default(
        weight, local.masked_fill(outside, 0), -1 if own_padding < 0 else own_padding
    )
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)  # type: ignore[no-any-return]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Mean cross entropy of vocabulary-sharded logits ``[rows, vocab / devices]`` without gathering them."""
    return _VocabParallelCrossEntropy.apply(logits, target, ignore_index, group)  # type: ignore[no-any-return, no-untyped-call]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, group: dist.ProcessGroup
    ) -> torch.Tensor:
        exact = logits if logits.dtype == torch.float64 else logits.float()
        top = exact.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group)
        own = (exact - top[:, None]).exp_()
        total = own.sum(-1)
        dist.all_reduce(total, group=group)
        local = target - dist.get_rank(group) * logits.shape[-1]
        outside = (local < 0) | (local >= logits.shape[-1])
        local = local.masked_fill(outside, 0)
        picked = exact.gather(-1, local[:, None])[:, 0] - top
        picked = picked.masked_fill(outside, 0.0)
        dist.all_reduce(picked, group=group)
        valid = target != ignore_index
        count = valid.sum().clamp(min=1)  # no valid label: loss and gradient 0
        loss = torch.where(valid, total.log() - picked, torch.zeros_like(total)).sum() / count
        ctx.save_for_backward(own.div_(total[:, None]), local, outside, valid, count)
        ctx.dtype = logits.dtype
        return loss.to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        probability, local, outside, valid, count = ctx.saved_tensors
        grad = probability.clone()
        hit = (~outside).to(grad.dtype)
        grad.scatter_add_(-1, local[:, None], -hit[:, None])
        grad *= (valid / count)[:, None] * grads[0]
        return grad.to(ctx.dtype), None, None, None


def row_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """This device's rows' share of the mean over all rows: a partial sum."""
    count = (target != ignore_index).sum().to(torch.float32)
    dist.all_reduce(count, group=group)
    count.clamp_(min=1)  # no valid label: loss and gradient 0
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=ignore_index) / count
