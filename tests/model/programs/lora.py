"""A frozen model with low-rank adapters (Hu et al. 2021, arXiv 2106.09685)."""

import torch
import torch.nn.functional as F
from torch import nn


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16).requires_grad_(False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16).requires_grad_(False), Adapted(nn.Linear(16, 16), 4), nn.GELU())
            for _ in range(3)
        )
        self.head = nn.Linear(16, 32).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def build_model() -> nn.Module:
    return Model()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(n * 8).reshape(n, 8) % 32
    return {"ids": ids, "labels": ids.roll(1, 1)}


def compute_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
