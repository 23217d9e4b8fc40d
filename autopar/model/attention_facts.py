"""What ``scaled_dot_product_attention`` keeps for backward and how it lays its result out: the device decides.

Fused kernels (FlashAttention, Dao et al. 2022, arXiv 2205.14135; memory-efficient attention, Rabe and Staats 2021,
arXiv 2112.05682) keep query, key, value, mask, output and one log-sum-exp per row. On CPU torch has one such kernel,
without dropout, trainable masks or values of another width than keys (``torch/native/transformers/sdp_utils_cpp.cpp``);
else it computes the product of products, which keeps the scores: what the meta device shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autopar.model.graph import TensorMeta


def is_fused(tensors: Sequence[torch.Tensor], dropout: float, device: str) -> bool:
    """Whether a fused kernel runs.

    Args:
        tensors: query, key, value and, if there is one, mask.
        dropout: probability.
        device: ``cpu``, or another whose kernels take all cases.
    """
    _, key, value, *mask = tensors
    trainable_mask = any(m.requires_grad for m in mask)
    return device != "cpu" or not (trainable_mask or dropout > 0 or key.shape[-1] != value.shape[-1])


def dropout_of(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """The dropout probability of a call."""
    return float(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def fused_output(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A tensor like the output as fused kernels lay it out: as the query, or by length before heads."""
    if query.shape == out.shape:
        return torch.empty_like(query)
    return torch.empty_like(out.transpose(-3, -2), memory_format=torch.contiguous_format).transpose(-3, -2)


def fused_saves(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[tuple[str, int] | TensorMeta, ...]:
    """What a fused kernel keeps; a boolean mask is kept as the additive one that torch makes of it."""
    query, _, _, *mask = tensors
    kept: list[tuple[str, int] | TensorMeta] = [("input", 0), ("input", 1), ("input", 2)]
    if mask and mask[0].dtype == torch.bool:
        kept.append(TensorMeta(tuple(mask[0].shape), query.dtype))
    elif mask:
        kept.append(("input", 3))
    return (*kept, ("output", 0), TensorMeta(tuple(out.shape[:-1]), torch.float32))
