"""Rewrites operators that change a tensor in place into ones that return a new tensor.

The sharding rules and the runtime then see values that never change. Changes of whole tensors and of slices are
rewritten in the graph; where other views see the change, torch's own functionalization retraces the program.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from autopar.model.lasting import changes_its_input, counts_batches, refuse_lasting_changes, restore_statistics
from autopar.model.regions import inline_regions


def functional(exported: ExportedProgram) -> ExportedProgram:
    """The program without in-place operators, and without the device of the trace in moves of tensors.

    Raises:
        CaptureError: it changes an input, a parameter, or a buffer other than a batch norm's.
    """
    exported = inline_regions(exported)
    refuse_lasting_changes(exported)
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
    changing = [n for n in exported.graph.nodes if changes_its_input(n) and not counts_batches(n)]
    if not all(_can_rewrite(n) for n in changing):
        exported = exported.run_decompositions({})
        restore_statistics(exported)
        return _without_clones(_without_copies(exported))
    for node in changing:
        _rewrite(node)
    return _without_copies(exported)


def _can_rewrite(node: fx.Node) -> bool:
    """Whether the changed tensor is whole or a slice of one that the graph made, and seen later through itself only."""
    chain = _chain(node.args[0])
    if _twin(node) is None or chain is None:
        return False
    later = _after(node)
    base, target = chain[0], chain[-1]
    return all(view in (base, target) or view is node or not later & set(view.users) for view in _views(base, later))


def _rewrite(node: fx.Node) -> None:
    """``changed = op(target); base = slice_scatter(base, changed)`` for ``op_(slice(base))``."""
    chain = _chain(node.args[0])
    twin, later = _twin(node), _after(node)
    assert chain is not None
    assert twin is not None
    node.target = twin
    chain[-1].replace_all_uses_with(node, delete_user_cb=lambda user: user in later)
    changed = node
    for whole, part in zip(reversed(chain[:-1]), reversed(chain[1:]), strict=True):
        with node.graph.inserting_after(changed):
            changed = _call(node.graph, _SCATTERS[part.target], (whole, changed, *part.args[1:]), node)
    if len(chain) > 1:
        later = _after(changed)
        chain[0].replace_all_uses_with(changed, delete_user_cb=lambda user: user in later)


_SCATTERS: dict[Any, OpOverload] = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}


def _chain(value: object) -> list[fx.Node] | None:
    """From a tensor that the graph made to a slice of a slice of it; None if that is not what the value is."""
    chain: list[fx.Node] = []
    while isinstance(value, fx.Node) and value.target in _SCATTERS:
        chain.insert(0, value)
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    made_by = value.args[0] if value.target is operator.getitem else value
    return None if _may_view(made_by) else [value, *chain]  # type: ignore[arg-type]


def _views(base: fx.Node, later: set[fx.Node]) -> set[fx.Node]:
    """What may share the storage of a tensor and was made before a point."""
    found: set[fx.Node] = set()
    stack = [base]
    while stack:
        for user in stack.pop().users:
            if user not in found and user not in later and (_may_view(user) or changes_its_input(user)):
                found.add(user)
                stack.append(user)
    return found


def _without_clones(exported: ExportedProgram) -> ExportedProgram:
    """Undoes what retracing makes of ``contiguous`` where meta tensors are laid out otherwise than others."""
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.clone.default and node.kwargs.get("memory_format") is torch.contiguous_format:
            node.target, node.kwargs = torch.ops.aten.contiguous.default, {}
    return exported


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
    made.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
    return made


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
