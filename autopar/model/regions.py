"""Inlines the regions that torch.export makes of ``with torch.no_grad():`` and ``with torch.autocast(...):``.

Such a region is exported as one call of a graph of its own. Inside ``no_grad`` no gradient flows: its operands are
detached, which is free and means the same. A switched-off autocast changes nothing, as precision is the plan's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from autopar.errors import CaptureError
from autopar.model.origin import where

GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def inline_regions(exported: ExportedProgram) -> ExportedProgram:
    """The program as one flat graph.

    Raises:
        CaptureError: the model switches autocast on, or has another nested graph (``torch.cond``, a loop).
    """
    module = exported.graph_module
    while calls := [n for n in module.graph.nodes if n.op == "call_function" and _nested(n)]:
        for call in calls:
            _inline(module, call)
    for node in [n for n in module.graph.nodes if n.op == "get_attr" and not n.users]:
        module.graph.erase_node(node)
    return exported


def _nested(call: fx.Node) -> bool:
    return any(isinstance(a, fx.Node) and a.op == "get_attr" and _is_graph(a) for a in call.args)


def _is_graph(node: fx.Node) -> bool:
    return isinstance(getattr(node.graph.owning_module, str(node.target), None), fx.GraphModule)


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    count = {GRAD: 2, AUTOCAST: 5}.get(call.target)  # type: ignore[call-overload]
    if count is None:
        raise CaptureError(
            f"the model has the nested graph {call.target}{where(call)}",
            "Avoid torch.cond and loops over tensors in forward",
        )
    settings, operands = call.args[: count - 1], call.args[count:]
    region = getattr(module, str(call.args[count - 1].target))
    if call.target is AUTOCAST and settings[2]:
        first = next(n for n in region.graph.nodes if n.op == "call_function")
        raise CaptureError(
            f"the model switches autocast on{where(first)}", "Leave the precision to the plan: --precision bf16"
        )
    values: dict[fx.Node, Any] = {}
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    stop = call.target is GRAD and not settings[0]
    with module.graph.inserting_before(call):
        for inner, operand in zip(inputs, operands, strict=True):
            values[inner] = _detached(module.graph, operand) if stop else operand
        for inner in region.graph.nodes:
            if inner.op == "get_attr":
                name = f"{call.name}_{inner.target}"
                setattr(module, name, getattr(region, str(inner.target)))
                values[inner] = module.graph.get_attr(name)
            elif inner.op == "call_function":
                values[inner] = module.graph.node_copy(inner, values.__getitem__)
    results: Any = region.graph.output_node().args[0]
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(values[results[user.args[1]]])
        module.graph.erase_node(user)
    module.graph.erase_node(call)


def _detached(graph: fx.Graph, operand: Any) -> Any:
    """A floating operand without its gradient; others as they are."""
    value = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return operand
    made = graph.call_function(torch.ops.aten.detach.default, (operand,))
    made.meta = {**operand.meta, "val": value.detach()}
    return made
