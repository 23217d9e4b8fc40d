"""A custom operator with a fake rule and a derivative, and a custom autograd function."""

from typing import Any

import torch
from torch import nn


@torch.library.custom_op("autopar_tests::cube", mutates_args=())
def cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


@cube.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _cube_backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return gradient * 3 * x**2


cube.register_autograd(_cube_backward, setup_context=_keep)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return 2 * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * gradient * y * (1 - y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = cube(Scaled.apply(layer(x)))
        return x.mean()


def build_model() -> nn.Module:
    return Model()


def example_batch(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, n * 8).reshape(n, 8)}
