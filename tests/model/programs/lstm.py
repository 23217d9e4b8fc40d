"""A two-layer LSTM that classifies sequences."""

import torch
import torch.nn.functional as F
from torch import nn


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.tokens(ids))
        return self.head(states[:, -1])


def build_model() -> nn.Module:
    return Classifier()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    return {"ids": torch.arange(n * 7).reshape(n, 7) % 50, "labels": torch.arange(n) % 5}


def compute_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch["labels"])
