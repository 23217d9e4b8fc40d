"""Copies layers that were left out of an export back into its graph.

The export has, for each run of alike layers, the period that stands for those left out (the template) and one more
like it behind. What the two differ in says how a copy differs from the one before it: a value that both read stays,
one that each reads from its own place moves along.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar.model.program import NAMED, Leaf, Program
from autopar.model.repeats import Repeat, longer_name, member_of, moved_name

Reads = tuple[Literal["same", "leaf", "before", "own"], int]  # how a copy's operand follows from the template's


def lengthened(program: Program, module: nn.Module, repeats: list[Repeat]) -> Program | None:
    """The program of the whole module.

    Args:
        program: of the module without the members left out.
        module: the whole one.
        repeats: what was left out.

    Returns:
        None where the export's layers differ in more than their place.
    """
    try:
        return _Lengthener(program, module, repeats).run()
    except _Unlike:
        return None


class _Unlike(Exception):
    """Two layers differ in more than their place."""


class _Lengthener:
    def __init__(self, program: Program, module: nn.Module, repeats: list[Repeat]) -> None:
        self.short, self.module = program, module
        self.leaves = {
            node: Leaf(leaf.kind, longer_name(leaf.name, repeats), leaf.constant)
            for node, leaf in program.leaves.items()
        }
        self.module_of = {node: longer_name(path, repeats) for node, path in program.module_of.items()}
        self.out = Program(fx.Graph(), {}, {})
        self.named: dict[str, fx.Node] = {}
        self.new: dict[fx.Node, fx.Node] = {}
        self.spans = [self._span(repeat) for repeat in repeats]

    def run(self) -> Program:
        self._placeholders()
        last_copy: dict[fx.Node, dict[fx.Node, fx.Node]] = {}  # per call of a period behind copies
        behind = {span.behind[0]: span for span in self.spans}
        for node in self.short.graph.nodes:
            if node in behind:
                copied = self._copies(behind[node])
                last_copy.update(dict.fromkeys(behind[node].behind, copied))
            if node.op == "call_function":
                moved = last_copy.get(node, {})
                self.new[node] = self._call(
                    node, self.module_of[node], [moved.get(n, self.new[n]) for n in _read(node)]
                )
            elif node.op == "output":
                self.out.graph.output(fx.map_arg(node.args[0], self.new.__getitem__))
        return self.out

    def _placeholders(self) -> None:
        """Parameters and buffers in the module's order, those of the copies among them; then the rest."""
        wanted = {leaf.name: node for node, leaf in self.leaves.items() if leaf.kind in NAMED}
        for span in self.spans:
            for node in span.own_leaves(self.leaves):
                for step in range(1, span.repeat.copies + 1):
                    wanted.setdefault(span.moved(self.leaves[node].name, step), node)
        places = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        for name, _ in places:
            if name in wanted and name not in self.named:
                leaf = self.leaves[wanted[name]]
                self.named[name] = self._placeholder(wanted[name], Leaf(leaf.kind, name, None))
        for node, leaf in self.leaves.items():
            self.new[node] = self.named[leaf.name] if leaf.kind in NAMED else self._placeholder(node, leaf)

    def _placeholder(self, like: fx.Node, leaf: Leaf) -> fx.Node:
        made = self.out.graph.placeholder(leaf.name.replace(".", "_"))
        made.meta = like.meta
        self.out.leaves[made] = leaf
        return made

    def _call(self, like: fx.Node, module: str, reads: list[fx.Node]) -> fx.Node:
        operands = iter(reads)
        args, kwargs = fx.map_arg((like.args, dict(like.kwargs)), lambda _: next(operands))
        made = self.out.graph.create_node("call_function", like.target, args, kwargs)
        made.meta = like.meta
        self.out.module_of[made] = module
        return made

    def _span(self, repeat: Repeat) -> _Span:
        calls = [n for n in self.short.graph.nodes if n.op == "call_function"]
        members = [member_of(self.module_of[n], repeat.path) for n in calls]
        bounds = (repeat.template, repeat.cut + repeat.gone, repeat.cut + repeat.gone + repeat.period)
        begin, end, behind = (next(i for i, m in enumerate(members) if m is not None and m >= b) for b in bounds)
        return _Span(repeat, calls[begin:end], calls[end:behind])

    def _copies(self, span: _Span) -> dict[fx.Node, fx.Node]:
        """Puts the copies behind the template; gives the template's calls in the last of them."""
        rules = list(self._rules(span))
        before = {node: self.new[node] for node in span.template}
        for step in range(1, span.repeat.copies + 1):
            copy: dict[fx.Node, fx.Node] = {}
            for node, rule in zip(span.template, rules, strict=True):
                reads = [
                    self.new[operand]
                    if how == "same"
                    else self.named[span.moved(self.leaves[operand].name, step)]
                    if how == "leaf"
                    else (before if how == "before" else copy)[span.template[index]]
                    for operand, (how, index) in zip(_read(node), rule, strict=True)
                ]
                copy[node] = self._call(node, span.moved(self.module_of[node], step), reads)
            before = copy
        return before

    def _rules(self, span: _Span) -> Iterator[list[Reads]]:
        """Per call of the template, how its copies' operands follow from its own."""
        if len(span.template) != len(span.behind):
            raise _Unlike
        places = {node: i for i, node in enumerate(span.template)}
        behind = {node: i for i, node in enumerate(span.behind)}
        steps = span.repeat.copies + 1
        for one, other in zip(span.template, span.behind, strict=True):
            alike = one.target == other.target and _settings(one) == _settings(other)
            if not alike or span.moved(self.module_of[one], steps) != self.module_of[other]:
                raise _Unlike
            rule: list[Reads] = []
            for a, b in zip(_read(one), _read(other), strict=True):
                if a is b or self._same_constant(a, b):
                    rule.append(("same", 0))
                elif (
                    a in self.leaves
                    and b in self.leaves
                    and span.moved(self.leaves[a].name, steps) == self.leaves[b].name
                ):
                    rule.append(("leaf", 0))
                elif b in places and a not in places:
                    rule.append(("before", places[b]))
                elif b in behind and places.get(a) == behind[b]:
                    rule.append(("own", behind[b]))
                else:
                    raise _Unlike
            yield rule

    def _same_constant(self, one: fx.Node, other: fx.Node) -> bool:
        a, b = (self.leaves[n].constant if n in self.leaves else None for n in (one, other))
        return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


@dataclass(frozen=True)
class _Span:
    """The calls of a template and of the period behind those left out."""

    repeat: Repeat
    template: list[fx.Node]
    behind: list[fx.Node]

    def moved(self, name: str, step: int) -> str:
        """A name of the template in a copy; the period behind is a step after the last."""
        return moved_name(name, self.repeat.path, step * self.repeat.period)

    def own_leaves(self, leaves: dict[fx.Node, Leaf]) -> list[fx.Node]:
        """The parameters and buffers of the template's members."""
        members = range(self.repeat.template, self.repeat.cut)
        named = {node: member_of(leaf.name, self.repeat.path) for node, leaf in leaves.items() if leaf.kind in NAMED}
        return [node for node, member in named.items() if member in members]


def _read(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def _settings(node: fx.Node) -> Any:
    return fx.map_arg((node.args, dict(node.kwargs)), lambda _: "read")
