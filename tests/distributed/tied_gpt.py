"""A model.py with the usual traps at once: tied embeddings, ignored labels, a frozen parameter, a buffer, two groups.

The labels of the last two samples are all ignored, so that some micro-batches have nothing to learn from.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autopar.zoo.gpt import Block

VOCABULARY, WIDTH, HEADS, LAYERS, SEQUENCE = 64, 32, 4, 4, 16


class TiedGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.positions.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(SEQUENCE, device=input_ids.device))
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model() -> nn.Module:
    return TiedGPT()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    text = torch.arange(batch_size * (SEQUENCE + 1)).reshape(batch_size, -1)
    text = (text * 31 + text // 7) % VOCABULARY
    labels = text[:, 1:].contiguous()
    rows, places = torch.arange(batch_size)[:, None], torch.arange(SEQUENCE)[None]
    ignored = (places < rows) | (rows >= max(1, batch_size - 2))
    return {"input_ids": text[:, :-1].contiguous(), "labels": torch.where(ignored, -100, labels)}


def compute_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    every = list(parameters)
    groups = [
        {"params": [p for p in every if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)
