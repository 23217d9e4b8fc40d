"""ResNet-50 (He et al. 2015, arXiv 1512.03385) on small images."""

import torch
import torch.nn.functional as F
from torch import nn


def conv(inp: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inp, out, size, stride, size // 2, bias=False), nn.BatchNorm2d(out))


class Bottleneck(nn.Module):
    def __init__(self, inp: int, mid: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(inp, mid, 1), nn.ReLU(inplace=True), conv(mid, mid, 3, stride), nn.ReLU(inplace=True)
        )
        self.out = conv(mid, 4 * mid, 1)
        self.short = conv(inp, 4 * mid, 1, stride) if stride > 1 or inp != 4 * mid else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.out(self.body(x)) + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        inp = 64
        for stage, (count, mid) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
            blocks = []
            for i in range(count):
                blocks.append(Bottleneck(inp, mid, 2 if i == 0 and stage > 1 else 1))
                inp = 4 * mid
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inp, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def build_model() -> nn.Module:
    return ResNet()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    return {
        "images": torch.linspace(-1, 1, n * 3 * 64 * 64).reshape(n, 3, 64, 64).sin(),
        "labels": torch.arange(n) % 10,
    }


def compute_loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(output, batch["labels"])
