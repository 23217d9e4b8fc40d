"""Gradients after the last backward of a step: summed over the axes that still hold partial sums, and clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from autopar.runtime.collectives import all_reduce_coalesced
from autopar.runtime.topology import Topology


@dataclass(frozen=True)
class Trained:
    """One trainable parameter of this process.

    Attributes:
        partial: operator-mesh axes over which its gradient is a partial sum.
        copies: on how many processes the same gradient elements exist after all reductions.
        tied: process group over the stages that hold a copy of it, or None.
    """

    name: str
    parameter: torch.nn.Parameter
    partial: tuple[str, ...]
    copies: int
    tied: dist.ProcessGroup | None = None

    @property
    def local_grad(self) -> torch.Tensor | None:
        return local(self.parameter.grad) if self.parameter.grad is not None else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a tensor; shares memory with it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reduce_gradients(trained: list[Trained], topology: Topology, data_axes: list[str], bucket_bytes: float) -> None:
    """Sums gradients over data shards (where FSDP has not), operator axes and tied copies, in place."""
    groups: dict[str, list[torch.Tensor]] = {}
    for one in trained:
        grad = one.local_grad
        if grad is None:  # unused in this step; the others of a group still take part
            one.parameter.grad = torch.zeros_like(one.parameter)
            grad = one.local_grad
        assert grad is not None
        for axis in (*one.partial, *data_axes):
            groups.setdefault(axis, []).append(grad)
    for axis, grads in groups.items():
        all_reduce_coalesced(grads, topology.group(axis), bucket_bytes)
    for one in trained:
        if one.tied is not None and one.local_grad is not None:
            all_reduce_coalesced([one.local_grad], one.tied, bucket_bytes)


def global_norm(trained: list[Trained]) -> torch.Tensor:
    """The 2-norm of the gradient of the whole model, each element counted once; the same on every process."""
    by_copies: dict[int, list[torch.Tensor]] = {}
    for one in trained:
        grad = one.local_grad
        if grad is not None:
            by_copies.setdefault(one.copies, []).append(grad)
    total = torch.zeros((), dtype=torch.float64)
    for copies, grads in by_copies.items():
        total += get_total_norm(grads).double().cpu().square() / copies
    if dist.is_initialized():
        total = total.to(trained[0].parameter.device if dist.get_backend() == "nccl" and trained else "cpu")
        dist.all_reduce(total)
    return total.sqrt().cpu()


def unscale(trained: list[Trained], scale: float) -> None:
    """Divides all gradients by the loss scale, in place."""
    grads = [grad for one in trained if (grad := one.local_grad) is not None]
    if grads:
        torch._foreach_div_(grads, scale)


def clip(trained: list[Trained], norm: torch.Tensor, limit: float) -> None:
    """Scales all gradients so that the global norm is at most ``limit``."""
    factor = limit / (float(norm) + 1e-6)
    if factor < 1:
        for one in trained:
            grad = one.local_grad
            if grad is not None:
                grad.mul_(factor)
