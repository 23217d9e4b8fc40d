"""A recommender with embedding tables (DLRM, Naumov et al. 2019, arXiv 1906.00091)."""

import torch
import torch.nn.functional as F
from torch import nn


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, 16, mode="sum") for rows in (1000, 300, 50)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(6 + 16, 32), nn.ReLU(), nn.Linear(32, 1))
        self.register_buffer("upper", torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = products[:, self.upper[0], self.upper[1]]
        return self.top(torch.cat([x, pairs], 1)).squeeze(1)


def build_model() -> nn.Module:
    return Recommender()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    return {
        "dense": torch.linspace(-1, 1, n * 13).reshape(n, 13),
        "sparse": torch.arange(n * 3 * 4).reshape(n, 3, 4) % 50,
        "clicks": (torch.arange(n) % 2).float(),
    }


def compute_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output, batch["clicks"])
