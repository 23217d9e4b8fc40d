"""Common operators over many sizes, for a device without a model: products, pointwise, norms, attention, embedding."""

from __future__ import annotations

import math

import torch

from autopar.model.graph import TensorMeta
from autopar.profiler.tasks import Fill, Operand, OperatorTask

ROWS = (64, 512, 2048, 8192)
WIDTHS = (128, 512, 2048)


def common_tasks(precision: str = "fp32") -> list[OperatorTask]:
    """Tasks of every common operator, small sizes first, so that a short budget covers all kinds."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    tasks = []
    for rows in ROWS:
        for width in WIDTHS:
            tasks.extend(_at(rows, width, dtype))
    return sorted(tasks, key=lambda task: sum(math.prod(m.shape) for m in task.inputs))


def _fill(shape: tuple[int, ...], dtype: torch.dtype, below: int = 0) -> Fill:
    return Fill(TensorMeta(shape, dtype), tuple(range(len(shape))), below, dtype.is_floating_point)


def _task(
    op: str, fills: list[Fill], output: Fill, *extra: object, flops: float = 0.0, attributes: str = ""
) -> OperatorTask:
    operands = tuple(Operand(i) for i in range(len(fills)))
    return OperatorTask(
        op=op,
        target=op,
        args=(*operands, *extra),
        kwargs={},
        operands=tuple(fills),
        outputs=(output.meta,),
        attributes=attributes,
        forward_flops=flops,
        backward_flops=2 * flops,
        importance=0.0,
    )


def _at(rows: int, width: int, dtype: torch.dtype) -> list[OperatorTask]:
    x, weight, vector = _fill((rows, width), dtype), _fill((width, width), dtype), _fill((width,), dtype)
    tasks = [
        _task("aten.linear.default", [x, weight, vector], x, flops=2.0 * rows * width * width),
        _task("aten.mm.default", [x, weight], x, flops=2.0 * rows * width * width),
        _task("aten.gelu.default", [x], x),
        _task("aten.add.Tensor", [x, x], x),
        _task("aten.mul.Tensor", [x, x], x),
        OperatorTask(
            **{
                **vars(_task("aten.layer_norm.default", [x, vector, vector], x)),
                "args": (Operand(0), [width], Operand(1), Operand(2)),
            }
        ),
        _task("aten.softmax.int", [x], x, -1),
        _task("aten.embedding.default", [x, _fill((rows,), torch.int64, rows)], x),
        _task("aten.cross_entropy_loss.default", [x, _fill((rows,), torch.int64, width)], _fill((), dtype)),
    ]
    length, head = min(rows, 1024), 64
    heads = _fill((rows // length, max(1, width // head), length, head), dtype)
    tasks.append(
        _task(
            "aten.scaled_dot_product_attention.default",
            [heads, heads, heads],
            heads,
            None,
            0.0,
            True,
            flops=4.0 * heads.meta.numel * length,
            attributes="attn_mask=None, dropout_p=0.0, is_causal=True",
        )
    )
    return tasks
