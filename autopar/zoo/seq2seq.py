"""A small encoder-decoder transformer: every decoder layer reads the encoder's last state; embeddings are shared."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
WIDTH = 128
HEADS = 4
LAYERS = 3
SOURCE = 64
TARGET = 48


class Attention(nn.Module):
    """Multi-head attention from ``x`` to ``memory``."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Self-attention, cross-attention (decoder only) and a two-layer perceptron."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention(causal=decoder)
        self.norm2 = nn.LayerNorm(WIDTH) if decoder else None
        self.cross = Attention(causal=False) if decoder else None
        self.norm3, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y)
        if self.cross is not None and self.norm2 is not None and memory is not None:
            x = x + self.cross(self.norm2(x), memory)
        out: torch.Tensor = x + self.down(F.relu(self.up(self.norm3(x))))
        return out


class Seq2Seq(nn.Module):
    """Source ids and target ids in, logits over the target out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SOURCE, WIDTH)
        self.encoder = nn.ModuleList(Layer(decoder=False) for _ in range(LAYERS))
        self.decoder = nn.ModuleList(Layer(decoder=True) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=WIDTH**-0.5)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return out

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def build_model() -> nn.Module:
    return Seq2Seq()


def example_batch(batch_size: int) -> dict[str, torch.Tensor]:
    text = (torch.arange(batch_size * (SOURCE + TARGET + 1)) * 31 % 253).reshape(batch_size, -1)
    source, target = text[:, :SOURCE], text[:, SOURCE:]
    return {
        "source": source.contiguous(),
        "target": target[:, :-1].contiguous(),
        "labels": target[:, 1:].contiguous(),
    }


def compute_loss(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
