"""Placements inside one block: an integer linear program over strategies and shared redistributions.

One-hot choice per operator, one flow per tensor use from the placement that is made to the placement that is wanted,
and one indicator per distinct redistribution, shared by all uses that want it alike. This is the program of Alpa
(Zheng et al. 2022, arXiv 2201.12023, section 4.2) with its edge costs shared between consumers; the flow form makes
the linear relaxation tight, exact on chains and trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pulp

from autopar.plan import Layout
from autopar.planner.prices import BlockPrices, Choice, Key, Spec, Weights, boundary_specs
from autopar.planner.solver import solver
from autopar.sharding.resolve import OUTPUT


@dataclass(frozen=True)
class Problem:
    """One block to place.

    Attributes:
        prices: of its choices.
        inputs, outputs: placement of each boundary activation, or None to let the program choose.
        shared: placements of parameters that other blocks use too.
        weights: of what choices add up.
    """

    prices: BlockPrices
    inputs: tuple[Spec | None, ...]
    outputs: tuple[Spec | None, ...]
    shared: Mapping[str, Spec] = field(default_factory=dict)
    weights: Weights = field(default_factory=Weights)


@dataclass(frozen=True)
class Solution:
    """A placed block; ``seconds`` per micro-batch, forward and backward, as the program counts them."""

    layout: Layout
    seconds: float
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]


def solve(problem: Problem) -> Solution | None:
    """The cheapest layout of a block, or None where the boundary cannot be met.

    Raises:
        AutoparError: no solver is installed.
    """
    return _Program(problem).solve()


class _Program:
    """Builds and solves the program of one block."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.prices = problem, problem.prices
        self.graph, self.block = self.prices.graph, self.prices.block
        self.vector = problem.weights.vector(self.prices.axes)
        self.terms: list[tuple[float, Any]] = []  # (seconds, 0-1 expression)
        self.model = pulp.LpProblem("block", pulp.LpMinimize)
        self.count = 0
        self.made: dict[str, dict[Spec, Any]] = {}  # producer -> placement -> 0-1 expression
        self.wanted: dict[tuple[str, int], dict[Key, Any]] = {}  # use -> what is wanted -> 0-1 expression
        self.chosen: dict[str, list[tuple[Choice, Any]]] = {}

    def solve(self) -> Solution | None:
        for name in self.prices.nodes:
            self._add_operator(name)
        self._add_boundaries()
        self._add_parameters()
        for producer, uses in self.prices.uses.items():
            if producer not in self.prices.single and not self._add_edges(producer, uses):
                return None
        return self._optimise()

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

    # --- operators and parameters ------------------------------------------------------------------------------

    def _add_operator(self, name: str) -> None:
        options = self.prices.choices(name)
        self.chosen[name] = list(zip(options, self._one_of(len(options)), strict=True))
        made: dict[Spec, Any] = {}
        for choice, x in self.chosen[name]:
            self.terms.append((float(self.prices.operator(name, choice) @ self.vector), x))
            _add(made, tuple(s.output for s in choice), x)
            for i in range(len(self.graph.nodes[name].inputs)):
                _add(self.wanted.setdefault((name, i), {}), self.prices.key(name, choice, i), x)
        self.made[name] = made

    def _add_parameters(self) -> None:
        for name in self.block.parameters:
            if name in self.prices.single:
                continue
            if name in self.problem.shared:
                self.made[name] = {self.problem.shared[name]: 1}
                continue
            wanted = [key for use in self.prices.uses.get(name, ()) for key in self.wanted[use]]
            options = self.prices.stored_as(name, wanted)
            self.made[name] = dict(zip(options, self._one_of(len(options)), strict=True))
            for spec, z in self.made[name].items():
                self.terms.append((float(self.prices.stored(name, spec) @ self.vector), z))

    # --- boundaries and edges --------------------------------------------------------------------------------

    def _add_boundaries(self) -> None:
        for name, spec in zip(self.block.inputs, self.problem.inputs, strict=True):
            options = (spec,) if spec is not None else boundary_specs(self.graph, name, self.prices.sizes)
            self.made[name] = dict(zip(options, self._one_of(len(options)), strict=True))
            for arriving, x in self.made[name].items():
                self.terms.append((float(self.prices.entering(name, arriving) @ self.vector), x))
        for i, (name, spec) in enumerate(zip(self.block.outputs, self.problem.outputs, strict=True)):
            options = (spec,) if spec is not None else boundary_specs(self.graph, name, self.prices.sizes)
            keys = [tuple((p, False) for p in option) for option in options]
            self.wanted[(OUTPUT, i)] = dict(zip(keys, self._one_of(len(keys)), strict=True))

    def _add_edges(self, producer: str, uses: list[tuple[str, int]]) -> bool:
        """Flows from what is made to what is wanted; False where some use cannot be met at all."""
        made = self.made.setdefault(producer, {self.prices.whole: 1})
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
        parts = self.prices.edge(producer, spec, key)
        return None if parts is None else float(parts @ self.vector)

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
        stored = {
            name: next(spec for spec, x in self.made[name].items() if _is_on(x))
            for name in self.block.parameters
            if name not in self.prices.single
        }
        layout = self.prices.layout(picked, inputs, outputs, stored)
        return Solution(layout, constant + varying, inputs, outputs)


def _add(sums: dict[Any, Any], key: Any, x: Any) -> None:
    sums[key] = sums[key] + x if key in sums else x


def _is_constant(x: Any) -> bool:
    return isinstance(x, int | float)


def _is_on(x: Any) -> bool:
    return float(pulp.value(x)) > 0.5
