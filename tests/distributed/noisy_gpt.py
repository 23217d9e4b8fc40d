"""A model.py with dropout behind attention, the perceptron and, inside, on what tensor parallelism shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, SEQUENCE = 64, 32, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.outer(self.down(self.inner(F.gelu(self.up(self.norm(x))))))
        return out


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def build_model() -> nn.Module:
    return Noisy()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    """Every sample is the same, so that only masks tell samples apart."""
    text = (torch.arange(SEQUENCE + 1) * 31 % VOCABULARY).expand(batch_size, -1)
    return {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def compute_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
