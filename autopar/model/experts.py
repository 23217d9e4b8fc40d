"""Lets transformers' mixture-of-experts layers run on :func:`autopar.model.grouped.grouped_mm`.

The same mathematics as transformers' own "grouped_mm" experts, in operators that keep their expert dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.model.grouped import grouped_mm

NAME = "autopar_grouped"


def register_experts() -> str:
    """Registers the implementation with transformers; returns the name to choose it by."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    return NAME


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Routed experts of one layer.

    Args:
        self: a transformers experts module (weights stacked over experts).
        hidden_states: [tokens, width].
        top_k_index: [tokens, k] expert of each routed row.
        top_k_weights: [tokens, k] share of each.

    Returns:
        [tokens, width].
    """
    top_k = top_k_index.shape[-1]
    expert = top_k_index.reshape(-1)
    order = expert.argsort(stable=True)
    sorted_expert = expert.index_select(0, order)
    numbers = torch.arange(self.num_experts, device=expert.device)
    ends = (expert[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
    first = "gate_up_proj" if self.has_gate else "up_proj"
    rows = _product(self, first, hidden_states.index_select(0, order // top_k), ends, sorted_expert)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _product(self, "down_proj", rows, ends, sorted_expert)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    back = rows.index_select(0, order.argsort()).reshape(-1, top_k, rows.shape[-1])
    return (back * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _product(
    module: Any, name: str, rows: torch.Tensor, ends: torch.Tensor, sorted_expert: torch.Tensor
) -> torch.Tensor:
    weight = getattr(module, name)
    out = grouped_mm(rows, weight if module.is_transposed else weight.transpose(1, 2), ends)
    return out + getattr(module, f"{name}_bias").index_select(0, sorted_expert) if module.has_bias else out
