"""Rewrites operators that change a tensor in place into ones that return a new tensor.

The sharding rules and the runtime then see values that never change. Simple cases are renamed in the graph; where the
changed tensor is a view of another, torch's own functionalization retraces the program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram


def functional(exported: ExportedProgram) -> ExportedProgram:
    """The program without in-place operators, and without the device of the trace in moves of tensors."""
    return _without_devices(_without_changes(exported))


def _without_devices(exported: ExportedProgram) -> ExportedProgram:
    """``to(device, dtype)`` names the meta device that was traced on; ``to(dtype)`` is the same on any one device."""
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.to.device:
            node.target = torch.ops.aten.to.dtype
            node.args = (node.args[0], *node.args[2:])
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "device"}
    return exported


def _without_changes(exported: ExportedProgram) -> ExportedProgram:
    changing = [n for n in exported.graph.nodes if _changes_its_input(n)]
    if not changing:
        return exported
    pairs = [(n, _twin(n)) for n in changing]
    if any(twin is None or _shared(n.args[0]) for n, twin in pairs):
        return _without_copies(exported.run_decompositions({}))
    for node, twin in pairs:
        assert twin is not None
        changed = node.args[0]
        assert isinstance(changed, fx.Node)
        node.target = twin
        later = _after(node)
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, later=later: user in later)  # type: ignore[misc]
    return _without_copies(exported)


def _without_copies(exported: ExportedProgram) -> ExportedProgram:
    """Replaces ``copy(target, source)``, which has no derivative, by the source in the target's shape and dtype."""
    aten = torch.ops.aten
    graph = exported.graph
    for node in [n for n in graph.nodes if n.target is aten.copy.default]:
        source, value = node.args[1], node.meta["val"]
        assert isinstance(source, fx.Node)
        with graph.inserting_before(node):
            if source.meta["val"].dtype != value.dtype:
                source = _call(graph, aten.to.dtype, (source, value.dtype), node)
            if tuple(source.meta["val"].shape) != tuple(value.shape):
                source = _call(graph, aten.expand.default, (source, list(value.shape)), node)
        node.replace_all_uses_with(source)
        graph.erase_node(node)
    return exported


def _call(graph: fx.Graph, target: OpOverload, args: tuple[Any, ...], like: fx.Node) -> fx.Node:
    """A new call with the place in the source of another."""
    made = graph.call_function(target, args)
    made.meta = dict(like.meta)
    made.meta["val"] = target(args[0].meta["val"], *args[1:])
    return made


def _changes_its_input(node: fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _twin(node: fx.Node) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    target = node.target
    assert isinstance(target, OpOverload)
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    first_changes = bool(target._schema.arguments[0].alias_info)
    if packet is None or not name.endswith("_") or not first_changes:
        return None
    twin = getattr(packet, target._overloadname, None)
    return twin if isinstance(twin, OpOverload) and not twin._schema.is_mutable else None


def _shared(value: object) -> bool:
    """Whether a value shares its storage with another value of the graph, or comes from outside."""
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return True
    return _may_view(value) or any(_may_view(user) for user in value.users)


def _may_view(node: fx.Node) -> bool:
    """Whether a call returns (or may return) a view of an operand."""
    if not isinstance(node.target, OpOverload):
        return True
    schema = node.target._schema
    reshapes = schema.name in ("aten::reshape", "aten::contiguous", "aten::to", "aten::flatten", "aten::_to_copy")
    return reshapes or (not schema.is_mutable and any(r.alias_info is not None for r in schema.returns))


def _after(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    step = node.next
    while step.op != "root":
        found.add(step)
        step = step.next
    return found
