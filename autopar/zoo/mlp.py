"""A multilayer perceptron on random regression data: the smallest model worth planning."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

FEATURES = 64
HIDDEN = 256
LAYERS = 4


def build_model() -> nn.Module:
    sizes = [FEATURES, *[HIDDEN] * (LAYERS - 1), 1]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def example_batch(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, batch_size * FEATURES).reshape(batch_size, FEATURES)
    return x, x.square().mean(1, keepdim=True)


def compute_loss(output: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return F.mse_loss(output, batch[1])
