"""Lets transformers' attention skip its mask under export, as it does in training.

Where nothing but causality (or nothing at all) is masked, transformers in training passes no mask to
``scaled_dot_product_attention``, which can then use its fast kernels; under ``torch.export`` it always builds one,
because an exported model might be used for generation. Likewise it then reads packed sequences into every batch of
which it makes the positions itself. A captured model is only ever trained, on whole sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAME = "autopar_sdpa"


def register_masks() -> str:
    """Registers attention and mask with transformers; returns the name to choose them by."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, training_mask)
    return NAME


def training_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass without a cache, or None where the attention operator's own suffices.

    Args:
        q_length, kv_length: queries and keys per sample.
        attention_mask: [batch, keys] of a padded batch.
        local_size: width of a sliding window.
        allow_is_causal_skip, allow_is_bidirectional_skip: whether the mask is causal, or everything, and no more.
    """
    from transformers.masking_utils import sdpa_mask

    plain = attention_mask is None and (local_size is None or kv_length < local_size)
    if plain and ((allow_is_causal_skip and q_length == kv_length) or allow_is_bidirectional_skip):
        return None
    return sdpa_mask(
        q_length=q_length,
        kv_length=kv_length,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **others,
    )


def without_packing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that takes sequences as whole unless it is given their ``position_ids``."""
    from transformers import masking_utils

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None:
            return forward(*args, **kwargs)
        find = masking_utils.find_packed_sequence_indices
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
        try:
            return forward(*args, **kwargs)
        finally:
            masking_utils.find_packed_sequence_indices = find

    return call
