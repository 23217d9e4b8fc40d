"""What a forward pass may change for good: the running statistics of batch norms, nothing else.

``aten.batch_norm`` in training updates its running mean and variance wherever it runs, and the layer counts its
batches by ``num_batches_tracked.add_(1)``. Both stay in the graph as they are, so whoever runs the graph on the real
buffers updates them. Any other lasting change would make a plan's result depend on how its micro-batches are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import CaptureError
from autopar.model.origin import where

aten = torch.ops.aten


def changes_its_input(node: fx.Node) -> bool:
    """Whether a call writes into one of its operands by its schema."""
    return node.op == "call_function" and isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def counts_batches(node: fx.Node) -> bool:
    """``buffer.add_(number)`` on an integer whose result nobody reads."""
    first = node.args[0] if node.args else None
    return (
        node.target is aten.add_.Tensor
        and isinstance(first, fx.Node)
        and first.op == "placeholder"
        and not first.meta["val"].dtype.is_floating_point
        and isinstance(node.args[1], int)
        and not node.users
    )


def refuse_lasting_changes(exported: ExportedProgram) -> None:
    """Refuses a program that changes its inputs, parameters or buffers.

    Raises:
        CaptureError: names what is changed, the module and the source line.
    """
    kinds = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    for node in exported.graph.nodes:
        if not changes_its_input(node) or counts_batches(node):
            continue
        for changed in _written(node):
            base = _base(changed)
            if base.op != "placeholder":
                continue
            spec = kinds[base.name]
            what = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "input")
            name = str(spec.target or base.target).removeprefix("model.")
            remedy = "Change a copy: x = x.clone()" if what == "input" else "Keep the model free of state"
            raise CaptureError(
                f"the forward pass changes the {what} {name!r} in place{where(node)}",
                f"{remedy}; only batch norms may update their statistics",
            )


@contextmanager
def refuse_new_buffers(model: nn.Module) -> Iterator[None]:
    """While it holds, a forward pass that puts another tensor in the place of a buffer is refused.

    torch.export (2.13) drops ``self.buffer = ...`` of an inner module without a word.

    Raises:
        CaptureError: names the buffer.
    """
    held: dict[str, torch.Tensor] = {}

    def before(*_: Any) -> None:
        held.update(model.named_buffers())

    def after(*_: Any) -> None:
        for name, buffer in model.named_buffers():
            if held.get(name) is not buffer:
                raise CaptureError(
                    f"the forward pass changes the buffer {name!r} by giving it another tensor",
                    "Keep the model free of state; only batch norms may update their statistics",
                )

    hooks = model.register_forward_pre_hook(before), model.register_forward_hook(after)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _written(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes into."""
    assert isinstance(node.target, OpOverload)
    names = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    positions = {a.name: i for i, a in enumerate(node.target._schema.arguments)}
    found: list[fx.Node] = []
    for name in names:
        value: Any = node.args[positions[name]] if positions[name] < len(node.args) else node.kwargs.get(name)
        fx.map_arg(value, found.append)
    return found


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a chain of views starts from."""
    while node.op == "call_function" and isinstance(node.target, OpOverload):
        schema = node.target._schema
        views = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
        writes = schema.is_mutable
        if not (views or writes) or not isinstance(node.args[0], fx.Node):
            return node
        node = node.args[0]
    return node


def restore_statistics(exported: ExportedProgram) -> None:
    """After torch's functionalization: batch norms that update their buffers themselves, as before it."""
    graph, output = exported.graph, exported.graph.output_node()
    specs = exported.graph_signature.output_specs
    results: Any = output.args[0]
    kept = [i for i, spec in enumerate(specs) if spec.kind is not OutputKind.BUFFER_MUTATION]
    counted = [r for i, r in enumerate(results) if i not in kept and r.target is aten.add.Tensor]
    output.args = (tuple(results[i] for i in kept),)
    specs[:] = [specs[i] for i in kept]
    for node in counted:
        node.target = aten.add_.Tensor
    for node in [n for n in graph.nodes if n.target is aten._native_batch_norm_legit_functional.default]:
        with graph.inserting_before(node):
            made = graph.call_function(aten.batch_norm.default, (*node.args, False))
        made.meta = {**node.meta, "val": node.meta["val"][0]}
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(made)
            if not user.users:
                graph.erase_node(user)
        graph.erase_node(node)
