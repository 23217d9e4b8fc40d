"""Every strategy of every rule, run on emulated devices: results and gradients equal the whole operator's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from autopar.model.graph import OpGraph
from autopar.sharding import ops
from autopar.sharding.localize import localize
from autopar.sharding.placement import P, Placement, R
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy, parse_strategy
from tests.sharding.tiny import tiny_graph


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


CASES = {
    "add": (lambda a, b: a + b, [rand(4, 6, 8), rand(4, 6, 8)]),
    "add_broadcast": (lambda a, b: a + b, [rand(4, 6, 8), rand(6, 1)]),
    "mul_scalar": (lambda a: a * 3, [rand(4, 8)]),
    "gelu": (F.gelu, [rand(4, 8)]),
    "linear": (F.linear, [rand(2, 4, 8), rand(12, 8)]),
    "linear_bias": (F.linear, [rand(2, 4, 8), rand(12, 8), rand(12)]),
    "matmul": (torch.matmul, [rand(2, 4, 6, 8), rand(2, 4, 8, 12)]),
    "matmul_broadcast": (torch.matmul, [rand(4, 6, 8), rand(8, 12)]),
    "addmm": (torch.addmm, [rand(12), rand(6, 8), rand(8, 12)]),
    "embedding": (lambda w, i: F.embedding(i, w), [rand(16, 8), index(16, 4, 6)]),
    "attention": (F.scaled_dot_product_attention, [rand(2, 4, 6, 8), rand(2, 4, 10, 8), rand(2, 4, 10, 8)]),
    "attention_causal": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [rand(2, 4, 6, 8), rand(2, 4, 6, 8), rand(2, 4, 6, 8)],
    ),
    "attention_grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        [rand(2, 8, 6, 8), rand(2, 4, 6, 8), rand(2, 4, 6, 8)],
    ),
    "attention_mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m),
        [rand(2, 4, 6, 8), rand(2, 4, 10, 8), rand(2, 4, 10, 8), rand(2, 1, 6, 10)],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), [rand(4, 6, 8), rand(8), rand(8)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [rand(4, 6, 8), rand(8)]),
    "softmax": (lambda x: F.softmax(x, -1), [rand(4, 6, 8)]),
    "cross_entropy": (F.cross_entropy, [rand(8, 12), index(12, 8)]),
    "mse": (F.mse_loss, [rand(4, 8), rand(4, 8)]),
    "mse_sum": (lambda a, b: F.mse_loss(a, b, reduction="sum"), [rand(4, 8), rand(4, 8)]),
    "sum_dim": (lambda x: x.sum(1), [rand(4, 6, 8)]),
    "mean_all": (lambda x: x.mean(), [rand(4, 6)]),
    "mean_keep": (lambda x: x.mean(-1, keepdim=True), [rand(4, 8)]),
    "conv2d": (F.conv2d, [rand(2, 4, 6, 6), rand(8, 4, 3, 3), rand(8)]),
    "view_split": (lambda x: x.view(2, 6, 4, 2), [rand(2, 6, 8)]),
    "view_merge": (lambda x: x.view(2, 48), [rand(2, 4, 12)]),
    "reshape_mix": (lambda x: x.reshape(8, 6, 2), [rand(4, 4, 6)]),
    "flatten": (lambda x: x.flatten(0, 1), [rand(4, 6, 8)]),
    "unsqueeze": (lambda x: x.unsqueeze(1), [rand(4, 6)]),
    "transpose": (lambda x: x.transpose(1, 2), [rand(2, 4, 6)]),
    "permute": (lambda x: x.permute(2, 0, 1), [rand(2, 4, 6)]),
    "expand": (lambda x: x.expand(4, 6, 8), [rand(6, 1)]),
    "slice": (lambda x: x[:, 1:5], [rand(4, 6, 8)]),
    "select": (lambda x: x[:, 1], [rand(4, 6, 8)]),
    "split": (lambda x: x.split(2, 1)[1], [rand(4, 6, 8)]),
    "chunk": (lambda x: x.chunk(2, -1)[0], [rand(4, 6, 8)]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [rand(4, 6), rand(4, 2)]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [rand(4, 6), rand(4, 6)]),
    "topk": (lambda x: x.topk(2, -1)[0], [rand(4, 6)]),
    "cumsum": (lambda x: x.cumsum(0), [rand(4, 6)]),
    "max_pool": (lambda x: F.max_pool2d(x, 2), [rand(2, 4, 6, 6)]),
}


def cut(x: torch.Tensor, placement: Placement, rank: int, size: int) -> torch.Tensor:
    if placement.is_shard:
        return x.chunk(size, placement.dim)[rank].clone()
    if placement == P:  # unequal summands
        weights = torch.arange(1, size + 1, dtype=x.dtype)
        return x * weights[rank] / weights.sum()
    return x.clone()


def joined(pieces: list[torch.Tensor], placement: Placement) -> torch.Tensor:
    if placement.is_shard:
        return torch.cat(pieces, placement.dim)
    if placement == P:
        return torch.stack(pieces).sum(0)
    for piece in pieces[1:]:
        torch.testing.assert_close(piece, pieces[0])
    return pieces[0]


def needs_group(graph: OpGraph, name: str, strategy: Strategy, size: int) -> bool:
    return localize(graph, name, {"tp": strategy}, {"tp": size}).axis is not None


def run(graph: OpGraph, name: str, operands: list[torch.Tensor], strategy: Strategy | None, size: int) -> Any:
    """Runs one operator on given operands, whole (strategy None) or as one device would."""
    node = graph.fx_node(name)
    queue = {id(n): None for n in node.all_input_nodes}
    values = dict(zip(list(queue), operands, strict=True))
    call = localize(graph, name, {"tp": strategy} if strategy else {}, {"tp": size})
    scaled = {id(call.operand_scale[0]): call.operand_scale[1]} if call.operand_scale else {}

    def load(n: fx.Node) -> torch.Tensor:
        value = values[id(n)]
        return ops.scale_forward(value, scaled[id(n)]) if id(n) in scaled else value

    result = call.target(*fx.map_arg(call.args, load), **fx.map_arg(call.kwargs, load))
    return result * call.output_scale if call.output_scale is not None else result


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_every_strategy_equals_the_whole_operator(case: str, size: int) -> None:
    function, inputs = CASES[case]
    graph = tiny_graph(function, inputs)
    values: dict[str, Any] = dict(zip([n.name for n in graph.of_kind("input")], inputs, strict=True))
    tried = 0
    for node in graph.of_kind("op"):
        operands = [values[name] for name in dict.fromkeys(node.inputs)]
        if any(isinstance(v, list | tuple) for v in operands):  # getitem of a multi-output operator
            values[node.name] = run(graph, node.name, operands, None, 1)
            continue
        wholes = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
        result = run(graph, node.name, wholes, None, 1)
        values[node.name] = torch.utils._pytree.tree_map(lambda x: x.detach(), result)
        first = result[0] if isinstance(result, list | tuple) else result
        cotangent = torch.randn_like(first)
        first.backward(cotangent)
        for strategy in strategies(graph, node, size):
            if needs_group(graph, node.name, strategy, size):
                continue  # tests/sharding/test_ops.py runs these in real processes
            tried += 1
            locals_, outs = [], []
            for rank in range(size):
                mine = [
                    cut(x.detach(), p, rank, size).requires_grad_(x.is_floating_point())
                    for x, p in zip(wholes, strategy.inputs, strict=True)
                ]
                out = run(graph, node.name, mine, strategy, size)
                out = out[0] if isinstance(out, list | tuple) else out
                grad = cut(cotangent, strategy.output, rank, size) if strategy.output.is_shard else cotangent
                out.backward(grad)
                locals_.append(mine)
                outs.append(out.detach())
            torch.testing.assert_close(
                joined(outs, strategy.output), first.detach(), msg=lambda m, s=strategy: f"{s}: {m}"
            )
            for i, whole in enumerate(wholes):
                if whole.grad is None:
                    continue
                grads = [mine[i].grad for mine in locals_]
                placement = P if strategy.grad_partial[i] else R if strategy.inputs[i] == P else strategy.inputs[i]
                torch.testing.assert_close(
                    joined(grads, placement), whole.grad, msg=lambda m, s=strategy, i=i: f"{s} grad {i}: {m}"
                )
    assert tried > 0


def texts(function: Any, inputs: list[torch.Tensor], size: int = 2) -> list[str]:
    graph = tiny_graph(function, inputs)
    last = list(graph.of_kind("op"))[-1]
    return [str(s) for s in strategies(graph, last, size)]


def test_linear_offers_column_row_and_batch_parallel() -> None:
    assert texts(*CASES["linear_bias"]) == [
        "R R R -> R",
        "S(0) R R -> S(0)",
        "S(1) R R -> S(1)",
        "R S(0) S(0) -> S(2)",
        "S(2) S(1) R -> P",
    ]


def test_a_dimension_that_does_not_divide_is_never_sharded() -> None:
    assert texts(F.linear, [rand(3, 8), rand(5, 8)], size=2) == ["R R -> R", "S(1) S(1) -> P"]


def test_heads_shard_through_view_and_transpose_when_they_divide() -> None:
    assert "S(2) -> S(2)" in texts(lambda x: x.view(2, 6, 4, 2), [rand(2, 6, 8)], 4)
    assert "S(2) -> S(2)" not in texts(lambda x: x.view(2, 6, 3, 4), [rand(2, 6, 12)], 4)


def test_an_unknown_operator_is_replicated() -> None:
    assert texts(torch.linalg.inv, [rand(4, 4)]) == ["R -> R"]


def test_text_form_round_trips() -> None:
    graph = tiny_graph(*CASES["linear_bias"])
    for strategy in strategies(graph, next(graph.of_kind("op")), 2):
        assert parse_strategy(str(strategy)) == strategy
