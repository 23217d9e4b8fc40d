"""U-Net (Ronneberger et al. 2015, arXiv 1505.04597): skips that pass over all blocks between."""

import torch
import torch.nn.functional as F
from torch import nn


class Level(nn.Module):
    def __init__(self, inp: int, out: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(inp, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.b(self.a(x).relu()).relu())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Level(3, 8), Level(8, 16), Level(16, 32)])
        self.middle = Level(32, 64)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(c, c // 2, 2, 2) for c in (64, 32, 16)])
        self.up = nn.ModuleList([Level(64, 32), Level(32, 16), Level(16, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, skips = images, []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for widen, level in zip(self.ups, self.up, strict=True):
            x = level(torch.cat([widen(x), skips.pop()], 1))
        return self.head(x)


def build_model() -> nn.Module:
    return UNet()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    images = torch.linspace(-1, 1, n * 3 * 32 * 32).reshape(n, 3, 32, 32).sin()
    return {"images": images, "targets": images.flip(3)}


def compute_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(output, batch["targets"])
