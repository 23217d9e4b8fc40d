"""A small vision transformer (Dosovitskiy et al. 2020, arXiv 2010.11929) on random 32 x 32 images."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

IMAGE = 32
PATCH = 4
CHANNELS = 3
WIDTH = 128
HEADS = 4
LAYERS = 4
CLASSES = 10


class Block(nn.Module):
    """Bidirectional attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (p(y).view(batch, length, HEADS, width // HEADS).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class ViT(nn.Module):
    """Images [batch, channels, height, width] in, class logits [batch, classes] out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, (IMAGE // PATCH) ** 2 + 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x[:, 0]))
        return logits


def build_model() -> nn.Module:
    return ViT()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    images = torch.linspace(-1, 1, batch_size * CHANNELS * IMAGE * IMAGE).reshape(batch_size, CHANNELS, IMAGE, IMAGE)
    return {"images": (images * 100).sin(), "labels": torch.arange(batch_size) % CLASSES}


def compute_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output, batch["labels"])
