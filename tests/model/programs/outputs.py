"""Dropout, several outputs in a dict, several losses, keyword inputs, and a setting that is no tensor."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.25), nn.Linear(24, 24), nn.Tanh())
        self.kind, self.value = nn.Linear(24, 4), nn.Linear(24, 1)

    def forward(self, *, features: torch.Tensor, scale: float = 1.0, detail: bool = False) -> dict[str, torch.Tensor]:
        x = self.body(features * scale)
        found = {"kind": self.kind(x), "value": self.value(x).squeeze(1)}
        return {**found, "hidden": x} if detail else found


def build_model() -> nn.Module:
    return TwoHeads()


def example_batch(n: int) -> dict[str, Any]:
    return {
        "features": torch.linspace(-1, 1, n * 12).reshape(n, 12),
        "kinds": torch.arange(n) % 4,
        "values": torch.arange(n).float(),
        "scale": 0.5,
        "detail": True,
    }


def compute_loss(output: dict[str, torch.Tensor], batch: dict[str, Any]) -> torch.Tensor:
    classes = F.cross_entropy(output["kind"], batch["kinds"])
    return classes + 0.1 * F.mse_loss(output["value"], batch["values"]) + 1e-3 * output["hidden"].square().mean()
