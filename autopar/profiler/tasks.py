"""Which operators to measure: every distinct one of a captured model at the local shapes that the search asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost.compute import ComputeModel
from autopar.cost.operators import VIEWS, attributes_of, base_name, work_of
from autopar.hardware.device import Device
from autopar.hardware.profiles import Signature, signature
from autopar.model.graph import OpGraph, OpNode, TensorMeta
from autopar.sharding.localize import localize
from autopar.sharding.placement import Placement, local_shape
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy

COPYING_VIEWS = frozenset({"reshape", "flatten", "split", "split_with_sizes", "slice", "select", "unbind", "chunk"})


@dataclass(frozen=True)
class Operand:
    """Stands for the i-th tensor operand in a task's arguments."""

    index: int


@dataclass(frozen=True)
class Fill:
    """How to make one operand.

    Attributes:
        meta: local shape and dtype.
        order: dimensions from the outermost in memory to the innermost, so that a transposed operand stays one.
        below: integers are drawn from 0 to this; 0 for floating operands.
        needs_grad: whether the backward pass computes its gradient.
    """

    meta: TensorMeta
    order: tuple[int, ...]
    below: int
    needs_grad: bool


@dataclass(frozen=True)
class OperatorTask:
    """One operator at one local shape; all fields can be sent to another process.

    Attributes:
        op: as in the graph, for looking the measurement up.
        target: the ATen overload to call.
        args, kwargs: with :class:`Operand` in place of tensors.
        outputs: local metas that the graph expects.
        importance: predicted seconds per micro-batch that operators of this kind take; measured in this order.
    """

    op: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[Fill, ...]
    outputs: tuple[TensorMeta, ...]
    attributes: str
    forward_flops: float
    backward_flops: float
    importance: float

    @property
    def inputs(self) -> tuple[TensorMeta, ...]:
        return tuple(fill.meta for fill in self.operands)

    @property
    def signature(self) -> Signature:
        return signature(self.op, self.inputs, self.outputs)


def tasks_of(graphs: Iterable[OpGraph], axis_sizes: Sequence[int], device: Device) -> list[OperatorTask]:
    """Distinct tasks of a model, the most important first.

    Args:
        graphs: the model captured at each micro-batch size that the search considers.
        axis_sizes: sizes of the mesh axes that operators may be sharded over; 1 is always included.
        device: what the importance is predicted for.
    """
    model = ComputeModel(device)
    found: dict[tuple[Signature, str], OperatorTask] = {}
    for graph in graphs:
        for node in graph.of_kind("op"):
            for size in sorted({1, *axis_sizes}):
                for strategy in _strategies(graph, node, size):
                    task = _task(graph, node, strategy, size, model)
                    if task is None:
                        continue
                    key = (task.signature, task.attributes)
                    if key in found:
                        old = found[key]
                        task = _with_importance(old, old.importance + task.importance)
                    found[key] = task
    return sorted(found.values(), key=lambda task: -task.importance)


def _with_importance(task: OperatorTask, importance: float) -> OperatorTask:
    return OperatorTask(**{**vars(task), "importance": importance})


def _strategies(graph: OpGraph, node: OpNode, size: int) -> tuple[Strategy, ...]:
    every = strategies(graph, node, max(size, 2))
    return every[:1] if size == 1 else every[1:]


def _task(graph: OpGraph, node: OpNode, strategy: Strategy, size: int, model: ComputeModel) -> OperatorTask | None:
    """None for what costs nothing or cannot be called by name: pure views, tuple accesses, custom callables."""
    name = base_name(node.op)
    if not node.outputs or (name in VIEWS and name not in COPYING_VIEWS):
        return None
    axis = "tp"
    call = localize(graph, node.name, {axis: strategy}, {axis: size})
    if call.axis is not None:  # runs as another operator with a collective inside; the plain one stands for its compute
        call = localize(graph, node.name, {}, {})
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    operands = _operands(graph, node, strategy, size)
    if operands is None:
        return None
    outputs = tuple(TensorMeta(_cut(m.shape, strategy.output, size), m.dtype) for m in node.outputs)
    attributes = attributes_of(graph.fx_node(node.name))
    counter = iter(range(len(operands)))

    def stand_in(_: fx.Node) -> Any:
        return Operand(next(counter))

    args, kwargs = fx.map_arg((call.args, call.kwargs), stand_in)
    inputs = tuple(fill.meta for fill in operands)
    share = _flops_share(node, graph, inputs, outputs)
    forward, backward = node.forward_flops * share, node.backward_flops * share
    seconds = model.operator_time(node.op, inputs, outputs, forward, "forward", "fp32", attributes)
    if node.requires_grad:
        seconds += model.operator_time(node.op, inputs, outputs, backward, "backward", "fp32", attributes)
    return OperatorTask(
        op=node.op,
        target=str(target),
        args=tuple(args),
        kwargs=dict(kwargs),
        operands=operands,
        outputs=outputs,
        attributes=attributes,
        forward_flops=forward,
        backward_flops=backward,
        importance=seconds,
    )


def _cut(shape: tuple[int, ...], placement: Placement, size: int) -> tuple[int, ...]:
    return local_shape(shape, [(placement, size)])


def _flops_share(
    node: OpNode, graph: OpGraph, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
) -> float:
    """Which part of the operator's FLOPs the local shapes hold."""
    if not node.forward_flops:
        return 0.0
    whole = work_of(node.op, [graph.nodes[n].outputs[0] for n in node.inputs], node.outputs, 0, "forward")
    local = work_of(node.op, inputs, outputs, 0, "forward")

    return local.flops / whole.flops if whole.flops else 1.0


def _operands(graph: OpGraph, node: OpNode, strategy: Strategy, size: int) -> tuple[Fill, ...] | None:
    metas = []
    for producer in node.inputs:
        source = graph.nodes[producer]
        if len(source.outputs) != 1:  # a tuple: only getitem reads it
            return None
        metas.append(source.meta)
    fills = []
    for index, (producer, meta, placement) in enumerate(zip(node.inputs, metas, strategy.inputs, strict=True)):
        local = TensorMeta(_cut(meta.shape, placement, size), meta.dtype)
        needs_grad = graph.nodes[producer].requires_grad and meta.dtype.is_floating_point
        below = 0 if meta.dtype.is_floating_point else _index_range(node, metas, strategy, size, index)
        fills.append(Fill(local, _memory_order(graph, producer, len(local.shape)), below, needs_grad))
    return tuple(fills)


def _index_range(node: OpNode, metas: Sequence[TensorMeta], strategy: Strategy, size: int, index: int) -> int:
    """Bound of an integer operand: rows of what it indexes."""
    if index == 0 or not metas[0].dtype.is_floating_point or not metas[0].shape:
        return 2
    name = base_name(node.op)
    local = _cut(metas[0].shape, strategy.inputs[0], size)
    if "loss" in name:  # class numbers
        return max(1, local[1] if len(local) > 1 else local[0])
    return max(1, min(local) if name not in ("embedding", "index_select", "index") else local[0])


def _memory_order(graph: OpGraph, producer: str, rank: int) -> tuple[int, ...]:
    """Dimensions by falling stride, as capture saw them; contiguous where it did not say."""
    value = graph.fx_node(producer).meta.get("val") if rank > 1 else None
    if not isinstance(value, torch.Tensor) or value.dim() != rank:
        return tuple(range(rank))
    strides = [int(stride) for stride in value.stride()]
    return tuple(sorted(range(rank), key=lambda d: (-strides[d], d)))
