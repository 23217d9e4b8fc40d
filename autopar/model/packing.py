"""OpGraph to bytes and back; torch's own pickling of a ``torch.fx.Graph`` leaves out what operators it calls."""

from __future__ import annotations

import dataclasses
import io
import operator
import pickle
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.model.graph import OpGraph


class _Ref(NamedTuple):
    """Stands for a node among the arguments of another."""

    name: str


def pack(graph: OpGraph) -> bytes:
    """A captured graph as bytes, without what was derived from it since.

    Raises:
        ValueError: it calls something that has no name to find it by again.
    """
    rows = [
        (node.op, node.name, _name_of(node), *fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Ref(n.name)))
        for node in graph.fx_graph.nodes
    ]
    held = {f.name: getattr(graph, f.name) for f in dataclasses.fields(graph) if f.name not in ("fx_graph", "facts")}
    file = io.BytesIO()
    pickle.dump((rows, held), file, protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


def unpack(packed: bytes) -> OpGraph:
    """The graph that :func:`pack` was given.

    Raises:
        Exception: the bytes are damaged, or name what this process does not have.
    """
    rows, held = pickle.loads(packed)
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs in rows:
        called = _called(target) if op == "call_function" else target
        node = graph.create_node(op, called, _filled(args, made), _filled(kwargs, made), name=name)
        node.name = name
        made[name] = node
    return OpGraph(fx_graph=graph, **held)


def _filled(value: Any, made: dict[str, fx.Node]) -> Any:
    """An argument with its nodes in place."""
    if isinstance(value, _Ref):
        return made[value.name]
    if isinstance(value, tuple | list):
        return type(value)(_filled(one, made) for one in value)
    if isinstance(value, dict):
        return {key: _filled(one, made) for key, one in value.items()}
    if isinstance(value, slice):
        return slice(*(_filled(one, made) for one in (value.start, value.stop, value.step)))
    return value


def _name_of(node: fx.Node) -> str:
    """The name of an operator; of other nodes their target, which is one."""
    target = node.target
    if isinstance(target, str):
        return target
    name = "getitem" if target is operator.getitem else str(target)
    if _called(name) is not target:
        raise ValueError(f"{target} is not found by its name")
    return name


def _called(name: str) -> Any:
    """An operator by its name (``aten.linear.default``)."""
    if name == "getitem":
        return operator.getitem
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found
