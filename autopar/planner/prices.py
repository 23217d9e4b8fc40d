"""What the choices inside one block take, as sums that weights turn into seconds: time, parameters, memory.

The parts depend on the block, the micro-batch size and the inner mesh axes alone. How often a forward runs, what a
parameter costs once a step, and the price of a byte differ between meshes and are weights; so parts are made once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.errors import PlanError
from autopar.model.graph import Block, OpGraph, OpNode
from autopar.plan import Layout, Mesh
from autopar.sharding.placement import Placement, R, local_shape
from autopar.sharding.redistribute import Conversion
from autopar.sharding.resolve import (
    OUTPUT,
    Step,
    axis_sizes,
    conversion_steps,
    parameter_label,
    shared_parameters,
)
from autopar.sharding.rules import strategies
from autopar.sharding.strategy import Strategy

Spec = tuple[Placement, ...]  # one placement per axis of the problem
Key = tuple[tuple[Placement, bool], ...]  # per axis: wanted placement, whether its gradient comes back partial
Choice = tuple[Strategy, ...]  # one strategy per axis
Array = NDArray[np.float64]

FORWARD, BACKWARD, ELEMENTS, KEPT, ENTERING, MADE, REDUCED = range(7)  # REDUCED and on: one for each axis
BYTE_TIE_BREAK_S = 1e-18  # seconds per byte: between equally fast placements the smaller one is taken


class Costs(Protocol):
    """What is asked of the cost engine."""

    def operator_cost(
        self, graph: OpGraph, node: OpNode, chosen: dict[str, Strategy], mesh: Mesh
    ) -> tuple[float, float]:
        """Seconds of one operator, forward and backward, without the collectives inside it."""

    def internal_cost(self, strategy: Strategy, axis: str, mesh: Mesh) -> tuple[float, float]:
        """Seconds of the collectives inside an operator, forward and backward."""

    def conversion_cost(self, step: Step, itemsize: int, mesh: Mesh) -> tuple[float, float]:
        """Seconds of one redistribution, forward and backward."""


@dataclass(frozen=True)
class Weights:
    """Seconds per micro-batch of everything that choices add up.

    Attributes:
        forward: how often the forward runs (2 with recomputation).
        backward: how often the backward runs.
        element_s: per local element of a trainable parameter.
        reduction_s: axis -> per local element of a parameter whose partial gradient is summed over it once a step.
        kept_s: per byte that operators keep for backward.
        entering_s: per byte of the block's inputs (what full recomputation keeps).
        made_s: per byte that operators make.
    """

    forward: float = 1.0
    backward: float = 1.0
    element_s: float = 0.0
    reduction_s: Mapping[str, float] | None = None
    kept_s: float = 0.0
    entering_s: float = 0.0
    made_s: float = BYTE_TIE_BREAK_S

    def vector(self, axes: Sequence[str]) -> Array:
        """In the order of the parts."""
        reductions = [(self.reduction_s or {}).get(axis, 0.0) for axis in axes]
        mine = (self.forward, self.backward, self.element_s, self.kept_s, self.entering_s, self.made_s)
        return np.array([*mine, *reductions])


def boundary_specs(graph: OpGraph, name: str, sizes: Mapping[str, int]) -> tuple[Spec, ...]:
    """Placements in which an activation may cross between blocks: R, or S(d) on a dimension that divides."""
    node = graph.nodes[name]
    whole = (R,) * len(sizes)
    if node.kind == "input" or not node.requires_grad or len(node.outputs) != 1:
        return (whole,)
    options = [(R, *(Placement("S", d) for d in range(len(node.meta.shape)))) for _ in sizes]
    return tuple(spec for spec in product(*options) if _divides(node.meta.shape, spec, tuple(sizes.values())))


def _divides(shape: tuple[int, ...], spec: Spec, sizes: tuple[int, ...]) -> bool:
    if any(p.is_shard and (p.dim >= len(shape) or shape[p.dim] < s) for p, s in zip(spec, sizes, strict=True)):
        return False
    try:
        local_shape(shape, list(zip(spec, sizes, strict=True)))
    except PlanError:
        return False
    return True


def choices_of(graph: OpGraph, node: OpNode, sizes: Mapping[str, int]) -> tuple[Choice, ...]:
    """Strategies of one operator over all axes; combinations whose shards do not divide are left out."""
    per_axis = [strategies(graph, node, size) for size in sizes.values()]
    if len(per_axis) == 1:
        return tuple((s,) for s in per_axis[0])
    extents = tuple(sizes.values())
    found = []
    for choice in product(*per_axis):
        operands = [
            (graph.nodes[name].meta.shape, tuple(s.inputs[i] for s in choice)) for i, name in enumerate(node.inputs)
        ]
        operands += [(node.meta.shape, tuple(s.output for s in choice))] if node.outputs else []
        if all(_divides(shape, spec, extents) for shape, spec in operands):
            found.append(choice)
    return tuple(found)


class BlockPrices:
    """The parts of one block on one mesh.

    Args:
        shared: its parameters that other blocks use too; how they lie is decided outside.
        keeps_inputs: per input, whether what operators keep of it counts here and not where it was made.
    """

    def __init__(
        self,
        graph: OpGraph,
        block: Block,
        mesh: Mesh,
        costs: Costs,
        shared: frozenset[str] = frozenset(),
        keeps_inputs: Sequence[bool] | None = None,
    ) -> None:
        self.graph, self.block, self.mesh, self.costs, self.shared = graph, block, mesh, costs, shared
        self.sizes = axis_sizes(mesh)
        self.axes = tuple(self.sizes)
        self.extents = tuple(self.sizes.values())
        self.whole: Spec = (R,) * len(self.sizes)
        self.nodes = (*block.prelude, *block.nodes)
        self.uses = self._uses()
        self.single = frozenset(
            name for name in block.parameters if name not in shared and len(self.uses.get(name, ())) == 1
        )
        keeps = (True,) * len(block.inputs) if keeps_inputs is None else tuple(keeps_inputs)
        self._counted_elsewhere = {n for n, here in zip(block.inputs, keeps, strict=True) if not here}
        self._savers = self._first_savers()

    def _uses(self) -> dict[str, list[tuple[str, int]]]:
        uses: dict[str, list[tuple[str, int]]] = {}
        for name in self.nodes:
            for i, producer in enumerate(self.graph.nodes[name].inputs):
                uses.setdefault(producer, []).append((name, i))
        for i, name in enumerate(self.block.outputs):
            uses.setdefault(name, []).append((OUTPUT, i))
        return uses

    def _first_savers(self) -> dict[tuple[str, int], str]:
        """Storage -> the operator that counts it; what several keep is kept once."""
        found: dict[tuple[str, int], str] = {}
        for name in self.block.nodes:
            for saved in self.graph.nodes[name].saved:
                if saved.source is not None:
                    found.setdefault((saved.source, saved.output), name)
        return found

    # --- operators -------------------------------------------------------------------------------------------

    def choices(self, name: str) -> tuple[Choice, ...]:
        """What an operator may do; what a prelude computes is replicated."""
        node = self.graph.nodes[name]
        options = choices_of(self.graph, node, self.sizes)
        if name in self.block.prelude:
            options = options[:1]
        return tuple(c for c in options if self._possible(node, c))

    def _possible(self, node: OpNode, choice: Choice) -> bool:
        """Partial sums are never stored: an operand that is no operator's result cannot be one."""
        for i, name in enumerate(node.inputs):
            inside = name in self.block.nodes or name in self.block.prelude
            if not inside and any(s.inputs[i].kind == "P" for s in choice):
                return False
        return True

    def key(self, name: str, choice: Choice, operand: int) -> Key:
        """How an operator wants an operand."""
        wants_grad = self.graph.nodes[self.graph.nodes[name].inputs[operand]].requires_grad
        return tuple(
            (s.inputs[operand], wants_grad and bool(s.grad_partial) and s.grad_partial[operand]) for s in choice
        )

    def operator(self, name: str, choice: Choice) -> Array:
        """Parts of one operator, of the parameters that it alone uses and of what it keeps."""
        node = self.graph.nodes[name]
        parts = self._none()
        named = dict(zip(self.axes, choice, strict=True))
        parts[[FORWARD, BACKWARD]] = self.costs.operator_cost(self.graph, node, named, self.mesh)
        for axis, strategy in named.items():
            if strategy.internal:
                parts[[FORWARD, BACKWARD]] += self.costs.internal_cost(strategy, axis, self.mesh)
        for i, parameter in enumerate(node.inputs):
            if parameter in self.single:
                key = self.key(name, choice, i)
                parts += self.stored(parameter, tuple(p for p, _ in key)) + self._reduced(parameter, key)
        parts[KEPT] = self._kept(node, choice)
        parts[MADE] = self._local(node.meta.nbytes, tuple(s.output for s in choice)) if node.outputs else 0.0
        return parts

    def _kept(self, node: OpNode, choice: Choice) -> float:
        """Local bytes kept for backward that no operator before counts."""
        total = 0.0
        for saved in node.saved:
            if saved.source is None or saved.source == node.name:
                total += self._local(saved.meta.nbytes, tuple(s.output for s in choice))
            elif self._savers[saved.source, saved.output] == node.name and self._counts(saved.source):
                total += self._local(saved.meta.nbytes, self._read_as(node, choice, saved.source))
        return total

    def _counts(self, source: str) -> bool:
        return source not in self._counted_elsewhere and self.graph.nodes[source].kind == "op"

    def _read_as(self, node: OpNode, choice: Choice, source: str) -> Spec:
        for i, operand in enumerate(node.inputs):
            if operand == source or self.graph.nodes[operand].alias_of == source:
                return tuple(s.inputs[i] for s in choice)
        return self.whole

    def layout(
        self, picked: Mapping[str, Choice], inputs: Sequence[Spec], outputs: Sequence[Spec], stored: Mapping[str, Spec]
    ) -> Layout:
        """The layout of these choices.

        Args:
            picked: of every operator.
            inputs, outputs: placements at the boundary.
            stored: of parameters with several uses.
        """
        labels = self.block.label_of()
        operators = {
            labels[name]: dict(zip(self.axes, map(str, choice), strict=True))
            for name, choice in picked.items()
            if name in labels and not all(s.is_replicated for s in choice)
        }
        parameters = {}
        for name in self.block.parameters:
            spec = self._at_rest(name, picked, stored)
            if any(p.is_shard for p in spec) or name not in self.single:
                parameters[parameter_label(self.block, self.graph.nodes[name])] = self._named(spec)
        return Layout(
            operators=operators,
            parameters=parameters,
            inputs=[self._named(spec) for spec in inputs],
            outputs=[self._named(spec) for spec in outputs],
        )

    def _at_rest(self, name: str, picked: Mapping[str, Choice], stored: Mapping[str, Spec]) -> Spec:
        if name not in self.single:
            return stored.get(name, self.whole)
        ((consumer, index),) = self.uses[name]
        return self.whole if consumer == OUTPUT else tuple(s.inputs[index] for s in picked[consumer])

    def _named(self, spec: Spec) -> dict[str, str]:
        return {axis: str(p) for axis, p in zip(self.axes, spec, strict=True)}

    # --- parameters and boundaries -----------------------------------------------------------------------------

    def stored(self, name: str, spec: Spec) -> Array:
        """Parts of a parameter that lies so."""
        parts, node = self._none(), self.graph.nodes[name]
        if node.requires_grad:
            parts[ELEMENTS] = int(self._local(node.meta.numel, spec))
        return parts

    def stored_as(self, name: str, wanted: Sequence[Key]) -> tuple[Spec, ...]:
        """How a parameter with several uses may lie: as one of them wants it, or whole."""
        if self.graph.nodes[name].kind != "parameter":
            return (self.whole,)
        return tuple(sorted({tuple(p for p, _ in key) for key in wanted} | {self.whole}))

    def entering(self, name: str, spec: Spec) -> Array:
        """Parts of a block input that arrives so."""
        parts, node = self._none(), self.graph.nodes[name]
        if node.kind == "op" and name not in self._counted_elsewhere:
            parts[ENTERING] = self._local(node.meta.nbytes, spec)
        return parts

    def _reduced(self, name: str, key: Key) -> Array:
        """The sum of a partial gradient, once a step."""
        parts, node = self._none(), self.graph.nodes[name]
        if node.requires_grad:
            local = int(self._local(node.meta.numel, tuple(p for p, _ in key)))
            for i, (_, partial) in enumerate(key):
                parts[REDUCED + i] = local if partial else 0
        return parts

    def least_workspace(self) -> float:
        """Bytes that the largest operator's results take at least, with their gradients (cut as far as can be)."""
        largest = 0.0
        for name in self.block.nodes:
            node = self.graph.nodes[name]
            if not node.is_view and node.outputs:
                nbytes = sum(meta.nbytes for meta in node.outputs)
                choices = self.choices(name)
                largest = max(largest, min(self._local(nbytes, tuple(s.output for s in c)) for c in choices))
        return 2 * largest

    # --- edges -------------------------------------------------------------------------------------------------

    def edge(self, producer: str, spec: Spec, key: Key) -> Array | None:
        """Parts of a redistribution, or None where it is impossible.

        The partial gradient of one block's parameter is summed once a step.
        """
        node = self.graph.nodes[producer]
        own = node.kind == "parameter" and producer not in shared_parameters(self.graph)
        if own and node.requires_grad and spec == tuple(p for p, _ in key):
            return self._reduced(producer, key)
        return self._conversion(producer, spec, key)

    def _conversion(self, producer: str, spec: Spec, key: Key) -> Array | None:
        node, parts = self.graph.nodes[producer], self._none()
        conversions: dict[str, Conversion] = {}
        for axis, src, (dst, partial) in zip(self.axes, spec, key, strict=True):
            if dst.kind == "P" and src.kind != "P":
                return None
            conversion = Conversion(src, dst, partial, node.requires_grad)
            if not conversion.is_identity:
                conversions[axis] = conversion
        if not conversions:
            return parts
        if len(node.outputs) != 1 or any(
            p.is_shard and not _divides(node.meta.shape, (p,), (n,))
            for (p, _), n in zip(key, self.extents, strict=True)
        ):
            return None
        placed = dict(zip(self.axes, spec, strict=True))
        try:
            steps = conversion_steps(conversions, placed, self.sizes, node.meta.shape, producer)
        except PlanError:
            return None
        for step in steps:
            parts[[FORWARD, BACKWARD]] += self.costs.conversion_cost(step, node.meta.dtype.itemsize, self.mesh)
        return parts

    def _none(self) -> Array:
        return np.zeros(REDUCED + len(self.axes))

    def _local(self, amount: int, spec: Spec) -> float:
        return amount / math.prod(n for p, n in zip(spec, self.extents, strict=True) if p.is_shard)
