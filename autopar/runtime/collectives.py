"""Redistribution of local tensors: the collectives that a plan names, each with its gradient.

Every function works on one process group; the names are those of :mod:`autopar.sharding.redistribute`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.sharding.placement import P, Placement, R
from autopar.sharding.redistribute import Conversion


class Redistribute(nn.Module):
    """Moves a local tensor from one placement to another; backward moves its gradient the other way."""

    def __init__(self, conversion: Conversion, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.conversion, self.group = conversion, group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = _Redistribute.apply(x, self.conversion, self.group)
        return moved

    def extra_repr(self) -> str:
        return f"{self.conversion.src} -> {self.conversion.dst}"


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, conversion: Conversion, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.conversion, ctx.group = conversion, group
        out = move(x, conversion.src, conversion.dst, group)
        return out.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        conversion: Conversion = ctx.conversion
        arrives = P if conversion.grad_partial else R if conversion.dst == P else conversion.dst
        leaves = R if conversion.src == P else conversion.src
        return move(grads[0], arrives, leaves, ctx.group), None, None


def move(x: torch.Tensor, src: Placement, dst: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's part under ``dst`` of a tensor of which it holds its part under ``src``."""
    if src == dst:
        return x
    if src == R:
        return x.chunk(dist.get_world_size(group), dst.dim)[dist.get_rank(group)].contiguous()
    if src == P:
        return all_reduce(x, group) if dst == R else reduce_scatter(x, dst.dim, group)
    return all_gather(x, src.dim, group) if dst == R else all_to_all(x, src.dim, dst.dim, group)


def all_reduce(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the group, in a new tensor."""
    out = x.contiguous().clone()
    dist.all_reduce(out, group=group)
    return out


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenation of all shards along ``dim``."""
    size = dist.get_world_size(group)
    x = x.contiguous()
    out = x.new_empty((size, *x.shape))
    dist.all_gather_single(out.view(-1), x.view(-1), group=group)
    return out.flatten(0, 1) if dim == 0 else torch.cat(out.unbind(0), dim)


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This process's shard along ``dim`` of the sum over the group."""
    pieces = torch.stack([p.contiguous() for p in x.chunk(dist.get_world_size(group), dim)])
    out = torch.empty_like(pieces[0])
    dist.reduce_scatter_single(out.view(-1), pieces.view(-1), group=group)
    return out


def all_to_all(x: torch.Tensor, src_dim: int, dst_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """From a shard along ``src_dim`` to a shard along ``dst_dim``."""
    pieces = torch.stack([p.contiguous() for p in x.chunk(dist.get_world_size(group), dst_dim)])
    out = torch.empty_like(pieces)
    dist.all_to_all_single(out.view(-1), pieces.view(-1), group=group)
    return torch.cat(out.unbind(0), src_dim)


def all_reduce_coalesced(tensors: list[torch.Tensor], group: dist.ProcessGroup, bucket_bytes: float) -> None:
    """Sums many tensors over the group in place, in flat buckets of about ``bucket_bytes``."""
    for bucket in _buckets(tensors, bucket_bytes):
        flat = torch.cat([t.reshape(-1) for t in bucket])
        dist.all_reduce(flat, group=group)
        for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def _buckets(tensors: list[torch.Tensor], bucket_bytes: float) -> list[list[torch.Tensor]]:
    """Neighbours of one dtype, together until a bucket is full."""
    buckets: list[list[torch.Tensor]] = []
    held = 0.0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or held + size > bucket_bytes or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            held = 0.0
        buckets[-1].append(tensor)
        held += size
    return buckets
