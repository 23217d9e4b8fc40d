"""Placements inside one block: an integer linear program over strategies and shared redistributions.

One-hot choice per operator, one flow per tensor use from the placement that is made to the placement that is wanted,
and one indicator per distinct redistribution, shared by all uses that want it alike. This is the program of Alpa
(Zheng et al. 2022, arXiv 2201.12023, section 4.2) with its edge costs shared between consumers; the flow form makes
the linear relaxation tight, exact on chains and trees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Protocol

import pulp

from autopar.errors import PlanError
from autopar.model.graph import Block, OpGraph, OpNode
from autopar.plan import Layout, Mesh
from autopar.planner.solver import solver
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

BYTE_TIE_BREAK_S = 1e-18  # seconds per byte: between equally fast placements the smaller one is taken


class Costs(Protocol):
    """What the program asks of the cost engine."""

    def operator_cost(
        self, graph: OpGraph, node: OpNode, chosen: dict[str, Strategy], mesh: Mesh
    ) -> tuple[float, float]:
        """Seconds of one operator, forward and backward, without the collectives inside it."""

    def internal_cost(self, strategy: Strategy, axis: str, mesh: Mesh) -> tuple[float, float]:
        """Seconds of the collectives inside an operator, forward and backward."""

    def conversion_cost(self, step: Step, itemsize: int, mesh: Mesh) -> tuple[float, float]:
        """Seconds of one redistribution, forward and backward."""


class ParameterCosts(Protocol):
    """What one parameter costs once per optimizer step."""

    def step(self, node: OpNode, local_numel: int) -> tuple[float, float]:
        """Seconds a step (optimizer, reduction over data) and bytes at rest (with gradient and states)."""

    def reduction(self, axis: str, local_numel: int) -> float:
        """Seconds a step to sum a replicated parameter's partial gradient over a mesh axis."""


@dataclass(frozen=True)
class Problem:
    """One block to place.

    Attributes:
        inputs, outputs: placement of each boundary activation, or None to let the program choose.
        shared: placements of parameters that other blocks use too.
        micro_batches: per step; what happens once a step is charged by this share.
        price: seconds per byte of memory.
        recompute: the forward runs twice.
    """

    graph: OpGraph
    block: Block
    mesh: Mesh
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    shared: Mapping[str, Spec] = field(default_factory=dict)
    micro_batches: int = 1
    price: float = 0.0
    recompute: bool = False


@dataclass(frozen=True)
class Solution:
    """A placed block; ``seconds`` per micro-batch, forward and backward, as the program counts them."""

    layout: Layout
    seconds: float
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


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


def solve(problem: Problem, costs: Costs, parameter_costs: ParameterCosts) -> Solution | None:
    """The cheapest layout of a block.

    Args:
        problem: the block and its boundary.
        costs: seconds of operators and redistributions.
        parameter_costs: what a parameter costs once a step.

    Returns:
        The layout, or None where the boundary cannot be met.

    Raises:
        AutoparError: no solver is installed.
    """
    return _Program(problem, costs, parameter_costs).solve()


class _Program:
    """Builds and solves the program of one block."""

    def __init__(self, problem: Problem, costs: Costs, parameter_costs: ParameterCosts) -> None:
        self.problem, self.costs, self.parameter_costs = problem, costs, parameter_costs
        self.graph, self.block = problem.graph, problem.block
        self.sizes = axis_sizes(problem.mesh)
        self.extents = tuple(self.sizes.values())
        self.whole: Spec = (R,) * len(self.sizes)
        self.terms: list[tuple[float, Any]] = []  # (seconds, 0-1 expression)
        self.model = pulp.LpProblem("block", pulp.LpMinimize)
        self.count = 0
        self.uses = self._uses()
        self.single = self._single_use_parameters()
        self.made: dict[str, dict[Spec, Any]] = {}  # producer -> placement -> 0-1 expression
        self.wanted: dict[tuple[str, int], dict[Key, Any]] = {}  # use -> what is wanted -> 0-1 expression
        self.chosen: dict[str, list[tuple[Choice, Any]]] = {}

    def solve(self) -> Solution | None:
        for name in (*self.block.prelude, *self.block.nodes):
            self._add_operator(name)
        self._add_boundaries()
        self._add_parameters()
        for producer, uses in self.uses.items():
            if producer not in self.single and not self._add_edges(producer, uses):
                return None
        return self._optimise()

    def _uses(self) -> dict[str, list[tuple[str, int]]]:
        uses: dict[str, list[tuple[str, int]]] = {}
        for name in (*self.block.prelude, *self.block.nodes):
            for i, producer in enumerate(self.graph.nodes[name].inputs):
                uses.setdefault(producer, []).append((name, i))
        for i, name in enumerate(self.block.outputs):
            uses.setdefault(name, []).append((OUTPUT, i))
        return uses

    def _single_use_parameters(self) -> set[str]:
        """Parameters with one use: stored as that use wants them, so their costs are the operator's."""
        return {
            name
            for name in self.block.parameters
            if name not in self.problem.shared and len(self.uses.get(name, ())) == 1
        }

    def _variable(self, binary: bool) -> Any:
        self.count += 1
        return pulp.LpVariable(f"v{self.count}", 0, 1, pulp.LpBinary if binary else pulp.LpContinuous)

    def _one_of(self, count: int) -> list[Any]:
        """Variables of which exactly one is 1; the constant 1 where there is only one."""
        if count == 1:
            return [1]
        found = [self._variable(True) for _ in range(count)]
        self.model += pulp.lpSum(found) == 1
        return found

    # --- operators -------------------------------------------------------------------------------------------

    def _add_operator(self, name: str) -> None:
        node = self.graph.nodes[name]
        options = choices_of(self.graph, node, self.sizes)
        if name in self.block.prelude:
            options = options[:1]
        options = tuple(c for c in options if self._possible(node, c))
        variables = self._one_of(len(options))
        self.chosen[name] = list(zip(options, variables, strict=True))
        made: dict[Spec, Any] = {}
        for choice, x in self.chosen[name]:
            self.terms.append((self._operator_seconds(node, choice), x))
            _add(made, tuple(s.output for s in choice), x)
            for i in range(len(node.inputs)):
                _add(self.wanted.setdefault((name, i), {}), self._key(node, choice, i), x)
        self.made[name] = made

    def _possible(self, node: OpNode, choice: Choice) -> bool:
        """Partial sums are never stored: an operand that is no operator's result cannot be one."""
        for i, name in enumerate(node.inputs):
            inside = name in self.block.nodes or name in self.block.prelude
            if not inside and any(s.inputs[i].kind == "P" for s in choice):
                return False
        return True

    def _key(self, node: OpNode, choice: Choice, operand: int) -> Key:
        wants_grad = self.graph.nodes[node.inputs[operand]].requires_grad
        return tuple(
            (s.inputs[operand], wants_grad and bool(s.grad_partial) and s.grad_partial[operand]) for s in choice
        )

    def _operator_seconds(self, node: OpNode, choice: Choice) -> float:
        named = dict(zip(self.sizes, choice, strict=True))
        forward, backward = self.costs.operator_cost(self.graph, node, named, self.problem.mesh)
        for axis, strategy in named.items():
            if strategy.internal:
                inside = self.costs.internal_cost(strategy, axis, self.problem.mesh)
                forward, backward = forward + inside[0], backward + inside[1]
        seconds = forward * (2 if self.problem.recompute else 1) + backward
        for i, name in enumerate(node.inputs):
            if name in self.single:
                seconds += self._parameter_seconds(name, self._key(node, choice, i))
        output = tuple(s.output for s in choice)
        kept = sum(self._bytes(saved.source or node.name, saved.meta.nbytes, node, choice) for saved in node.saved)
        return seconds + kept * self.problem.price + BYTE_TIE_BREAK_S * self._local(node.meta.nbytes, output)

    def _bytes(self, source: str, nbytes: int, node: OpNode, choice: Choice) -> float:
        """Local bytes of a saved tensor: cut as the operand it is, else as the result."""
        if source in node.inputs:
            if self.graph.nodes[source].kind in ("parameter", "buffer"):
                return 0.0
            index = node.inputs.index(source)
            return self._local(nbytes, tuple(s.inputs[index] for s in choice))
        return self._local(nbytes, tuple(s.output for s in choice))

    def _local(self, amount: int, spec: Spec) -> float:
        return amount / math.prod(n for p, n in zip(spec, self.extents, strict=True) if p.is_shard)

    # --- parameters ------------------------------------------------------------------------------------------

    def _parameter_seconds(self, name: str, key: Key) -> float:
        """Per micro-batch, of a parameter stored as its one use wants it."""
        node = self.graph.nodes[name]
        spec = tuple(p for p, _ in key)
        if not node.requires_grad:
            return 0.0
        local = int(self._local(node.meta.numel, spec))
        seconds, nbytes = self.parameter_costs.step(node, local)
        seconds += self._reduction_seconds(key, local)
        return seconds / self.problem.micro_batches + nbytes * self.problem.price

    def _reduction_seconds(self, key: Key, local_numel: int) -> float:
        partial = [axis for axis, (_, is_partial) in zip(self.sizes, key, strict=True) if is_partial]
        return sum(self.parameter_costs.reduction(axis, local_numel) for axis in partial)

    def _add_parameters(self) -> None:
        for name in self.block.parameters:
            if name in self.single:
                continue
            node = self.graph.nodes[name]
            if name in self.problem.shared:
                self.made[name] = {self.problem.shared[name]: 1}
                continue
            wanted = {tuple(p for p, _ in key) for use in self.uses.get(name, ()) for key in self.wanted[use]}
            options = sorted(wanted | {self.whole}) if node.kind == "parameter" else [self.whole]
            self.made[name] = dict(zip(options, self._one_of(len(options)), strict=True))
            for spec, z in self.made[name].items():
                if node.requires_grad:
                    seconds, nbytes = self.parameter_costs.step(node, int(self._local(node.meta.numel, spec)))
                    self.terms.append((seconds / self.problem.micro_batches + nbytes * self.problem.price, z))

    # --- boundaries and edges --------------------------------------------------------------------------------

    def _add_boundaries(self) -> None:
        for name, spec in zip(self.block.inputs, self.problem.inputs, strict=True):
            options = (spec,) if spec is not None else boundary_specs(self.graph, name, self.sizes)
            self.made[name] = dict(zip(options, self._one_of(len(options)), strict=True))
        for i, (name, spec) in enumerate(zip(self.block.outputs, self.problem.outputs, strict=True)):
            options = (spec,) if spec is not None else boundary_specs(self.graph, name, self.sizes)
            keys = [tuple((p, False) for p in option) for option in options]
            self.wanted[(OUTPUT, i)] = dict(zip(keys, self._one_of(len(keys)), strict=True))

    def _add_edges(self, producer: str, uses: list[tuple[str, int]]) -> bool:
        """Flows from what is made to what is wanted; False where some use cannot be met at all."""
        made = self.made.setdefault(producer, {self.whole: 1})
        shared: dict[tuple[Spec, Key], Any] = {}
        keys = {key for use in uses for key in self.wanted[use]}
        seconds = {(p, k): self._edge_seconds(producer, p, k) for p in made for k in keys}
        for use in uses:
            wanted = self.wanted[use]
            if all(seconds[p, k] == 0.0 for p in made for k in wanted):
                continue
            flows = self._flows(made, wanted, seconds)
            if flows is None:
                return False
            for pair, flow in flows.items():
                cost = seconds[pair]
                if not cost:
                    continue
                if pair not in shared:
                    shared[pair] = self._variable(False)
                    self.terms.append((cost, shared[pair]))
                self.model += shared[pair] >= flow
        return True

    def _edge_seconds(self, producer: str, spec: Spec, key: Key) -> float | None:
        """Of a redistribution per micro-batch; the partial gradient of one block's parameter is summed once a step."""
        node = self.graph.nodes[producer]
        own = node.kind == "parameter" and producer not in shared_parameters(self.graph)
        if own and node.requires_grad and spec == tuple(p for p, _ in key):
            return self._reduction_seconds(key, int(self._local(node.meta.numel, spec))) / self.problem.micro_batches
        return self._conversion_seconds(producer, spec, key)

    def _flows(
        self, made: dict[Spec, Any], wanted: dict[Key, Any], seconds: dict[tuple[Spec, Key], float | None]
    ) -> dict[tuple[Spec, Key], Any] | None:
        """0-1 expressions of each (made, wanted) pair, consistent with both one-hot choices."""
        pairs = [(p, k) for p in made for k in wanted if seconds[p, k] is not None]
        flows: dict[tuple[Spec, Key], Any] = {}
        for p, k in pairs:
            flows[p, k] = wanted[k] if len(made) == 1 else made[p] if len(wanted) == 1 else self._variable(False)
        for p, expression in made.items():
            if not self._equate([flows[pair] for pair in pairs if pair[0] == p], expression):
                return None
        for k, expression in wanted.items():
            if not self._equate([flows[pair] for pair in pairs if pair[1] == k], expression):
                return None
        return flows

    def _equate(self, parts: list[Any], total: Any) -> bool:
        """Adds ``sum(parts) == total``; False where both are constants and differ."""
        if len(parts) == 1 and parts[0] is total:
            return True
        constraint = pulp.lpSum(parts) - total
        if not isinstance(constraint, pulp.LpAffineExpression) or not len(constraint):
            return abs(float(pulp.value(constraint))) < 0.5
        self.model += constraint == 0
        return True

    def _conversion_seconds(self, producer: str, spec: Spec, key: Key) -> float | None:
        """Seconds forward and backward, or None where impossible."""
        node = self.graph.nodes[producer]
        conversions: dict[str, Conversion] = {}
        for axis, src, (dst, partial) in zip(self.sizes, spec, key, strict=True):
            if dst.kind == "P" and src.kind != "P":
                return None
            conversion = Conversion(src, dst, partial, node.requires_grad)
            if not conversion.is_identity:
                conversions[axis] = conversion
        if not conversions:
            return 0.0
        if len(node.outputs) != 1 or any(
            p.is_shard and not _divides(node.meta.shape, (p,), (n,))
            for (p, _), n in zip(key, self.extents, strict=True)
        ):
            return None
        try:
            steps = conversion_steps(
                conversions, dict(zip(self.sizes, spec, strict=True)), self.sizes, node.meta.shape, producer
            )
        except PlanError:
            return None
        total = 0.0
        for step in steps:
            forward, backward = self.costs.conversion_cost(step, node.meta.dtype.itemsize, self.problem.mesh)
            total += forward * (2 if self.problem.recompute else 1) + backward
        return total

    # --- solving ---------------------------------------------------------------------------------------------

    def _optimise(self) -> Solution | None:
        constant = sum(cost for cost, x in self.terms if _is_constant(x))
        scale = 1e6  # microseconds: solver tolerances are absolute
        self.model.setObjective(pulp.lpSum(cost * scale * x for cost, x in self.terms if not _is_constant(x)))
        if self.count:
            self.model.solve(solver())
            if pulp.LpStatus[self.model.status] != "Optimal":
                return None
        picked = {n: next(c for c, x in options if _is_on(x)) for n, options in self.chosen.items()}
        inputs = tuple(next(p for p, x in self.made[n].items() if _is_on(x)) for n in self.block.inputs)
        outputs = tuple(
            next(tuple(p for p, _ in k) for k, x in self.wanted[(OUTPUT, i)].items() if _is_on(x))
            for i in range(len(self.block.outputs))
        )
        varying = float(pulp.value(self.model.objective) or 0.0) / scale if self.count else 0.0
        return Solution(self._layout(picked, inputs, outputs), constant + varying, inputs, outputs)

    def _layout(self, picked: dict[str, Choice], inputs: tuple[Spec, ...], outputs: tuple[Spec, ...]) -> Layout:
        labels = self.block.label_of()
        operators = {
            labels[name]: dict(zip(self.sizes, map(str, choice), strict=True))
            for name, choice in picked.items()
            if name in labels and not all(s.is_replicated for s in choice)
        }
        parameters = {}
        for name in self.block.parameters:
            spec = self._stored(name, picked)
            if any(p.is_shard for p in spec) or name not in self.single:
                parameters[parameter_label(self.block, self.graph.nodes[name])] = self._named(spec)
        return Layout(
            operators=operators,
            parameters=parameters,
            inputs=[self._named(spec) for spec in inputs],
            outputs=[self._named(spec) for spec in outputs],
        )

    def _stored(self, name: str, picked: dict[str, Choice]) -> Spec:
        if name in self.single:
            ((consumer, index),) = self.uses[name]
            if consumer == OUTPUT:
                return self.whole
            return tuple(s.inputs[index] for s in picked[consumer])
        return next((p for p, x in self.made[name].items() if _is_on(x)), self.whole)

    def _named(self, spec: Spec) -> dict[str, str]:
        return {axis: str(p) for axis, p in zip(self.sizes, spec, strict=True)}


def _add(sums: dict[Any, Any], key: Any, x: Any) -> None:
    sums[key] = sums[key] + x if key in sums else x


def _is_constant(x: Any) -> bool:
    return isinstance(x, int | float)


def _is_on(x: Any) -> bool:
    return float(pulp.value(x)) > 0.5
