"""A small mixture-of-experts language model: every token is worked on by its best two of eight experts.

Routing is dropless and static in shape: each token gives ``TOP_K`` rows, which are sorted by expert, multiplied by
their expert's weights in one grouped product over the expert dimension, and sorted back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.model.grouped import grouped_mm
from autopar.zoo.gpt import Attention

VOCABULARY = 256  # bytes
WIDTH = 128
HEADS = 4
LAYERS = 4
SEQUENCE = 128
EXPERTS = 8
TOP_K = 2
HIDDEN = 256


class Experts(nn.Module):
    """A router and its experts, two-layer perceptrons whose weights are stacked: ``up`` is [experts, width, hidden]."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        nn.init.normal_(self.up, std=width**-0.5)
        nn.init.normal_(self.down, std=hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        share = share / share.sum(-1, keepdim=True)
        expert = chosen.flatten()
        order = expert.argsort(stable=True)
        back = order.argsort()
        ends = (expert[:, None] == torch.arange(self.up.shape[0], device=x.device)).sum(0).cumsum(0).to(torch.int32)
        rows = tokens.index_select(0, order // self.top_k)
        hidden = F.gelu(grouped_mm(rows, self.up, ends))
        results = grouped_mm(hidden, self.down, ends).index_select(0, back)
        mixed = (results.unflatten(0, (-1, self.top_k)) * share[..., None]).sum(1)
        return mixed.view_as(x)


class Block(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(WIDTH, HEADS)
        self.norm2, self.moe = nn.LayerNorm(WIDTH), Experts(WIDTH, HIDDEN, EXPERTS, TOP_K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        out: torch.Tensor = x + self.moe(self.norm2(x))
        return out


class MoE(nn.Module):
    """Token ids in, logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model() -> nn.Module:
    return MoE()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    text = torch.arange(batch_size * (SEQUENCE + 1)).reshape(batch_size, -1)
    text = (text * 31 + text // 7) % VOCABULARY
    return {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def compute_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
