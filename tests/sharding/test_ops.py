"""Operators with a collective inside, in two real processes, against the whole operator."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.sharding import ops
from tests.processes import spawn


def check_embedding(padding: int) -> None:
    torch.manual_seed(0)
    weight, ids = torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 8, (3, 5))
    whole = weight.clone().requires_grad_()
    expected = F.embedding(ids, whole, padding_idx=padding if padding >= 0 else None)
    cotangent = torch.randn_like(expected)
    expected.backward(cotangent)
    rank = dist.get_rank()
    mine = weight.chunk(2)[rank].clone().requires_grad_()
    out = ops.vocab_parallel_embedding(mine, ids, padding, group=dist.group.WORLD)
    out.backward(cotangent)
    total = out.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2)[rank])


def check_cross_entropy(ignored: bool, vocabulary: bool) -> None:
    torch.manual_seed(1)
    logits, target = torch.randn(6, 8, dtype=torch.float64) * 5, torch.randint(0, 8, (6,))
    if ignored:
        target[:2] = -100
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target)
    expected.backward()
    rank, group = dist.get_rank(), dist.group.WORLD
    dim = 1 if vocabulary else 0
    mine = logits.chunk(2, dim)[rank].clone().requires_grad_()
    if vocabulary:
        loss = ops.vocab_parallel_cross_entropy(mine, target, group=group)
        total: Any = loss.detach()
    else:
        loss = ops.row_parallel_cross_entropy(mine, target.chunk(2)[rank], group=group)
        total = loss.detach().clone()
        dist.all_reduce(total)
    loss.backward()
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, dim)[rank], rtol=1e-6, atol=1e-6)


def check_all() -> None:
    for padding in (-1, 0, 6):
        check_embedding(padding)
    for ignored in (False, True):
        for vocabulary in (False, True):
            check_cross_entropy(ignored, vocabulary)


def test_sharded_embedding_and_cross_entropy_equal_the_whole() -> None:
    spawn(2, check_all)


def test_a_bias_under_a_partial_sum_is_added_once_and_keeps_its_gradient() -> None:
    bias = torch.ones(3, requires_grad=True)
    out = ops.scale_forward(bias, 0.25)
    out.sum().backward()
    assert out.tolist() == [0.25] * 3
    assert bias.grad is not None
    assert bias.grad.tolist() == [1.0] * 3
