"""Placements along a chain whose blocks are too entangled for tables: the same dynamic programme over lazy solutions.

Blocks of one kind between equal boundaries share one solution of the integer program, and a pair of boundaries is only
solved once the programme's best path goes through it: until then the block's optimum with free boundaries, a lower
bound, stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.model.graph import Block, OpGraph
from autopar.plan import Mesh
from autopar.planner.chain import Chain
from autopar.planner.chain_tables import Boundaries, Shared, State
from autopar.planner.intra import Problem, Solution, solve
from autopar.planner.prices import BlockPrices, Costs, Spec, Weights


class ChainSolver:
    """Places all blocks of one model on one mesh at one micro-batch size.

    Args:
        weights: of what choices add up.
    """

    def __init__(self, graph: OpGraph, mesh: Mesh, costs: Costs, weights: Weights) -> None:
        self.graph, self.mesh, self.costs, self.weights = graph, mesh, costs, weights
        self.boundaries = Boundaries(graph, mesh)
        self.states = self.boundaries.states
        self._prices: dict[str, BlockPrices] = {}
        self._solved: dict[tuple[str, State, State, Shared], Solution | None] = {}
        self._free: dict[tuple[str, Shared], Solution | None] = {}

    def lower_bound(self) -> float:
        """Seconds per micro-batch that no layout can beat: every block with the boundaries it likes best."""
        if not self.boundaries.sizes:
            return self.best().seconds
        return min(
            sum(self._bound(block, shared) for block in self.graph.blocks) + self._shared_seconds(shared)
            for shared in self.boundaries.shared
        )

    def best(self) -> Chain:
        """The cheapest layouts."""
        found = [chain for shared in self.boundaries.shared if (chain := self._best(shared)) is not None]
        return min(found, key=lambda chain: chain.seconds)  # all replicated is always possible

    def _best(self, shared: Shared) -> Chain | None:
        while True:
            path, seconds = self._shortest(shared)
            if math.isinf(seconds):
                return None
            unsolved = [
                (block, a, b)
                for block, a, b in zip(self.graph.blocks, self._arrivals(path), path, strict=True)
                if self._key(block, a, b, shared) not in self._solved
            ]
            if not unsolved:
                solved = [
                    self._solution(block, a, b, shared)
                    for block, a, b in zip(self.graph.blocks, self._arrivals(path), path, strict=True)
                ]
                layouts = tuple(s.layout for s in solved if s is not None)
                return Chain(layouts, path, seconds + self._shared_seconds(shared))
            for block, a, b in unsolved:
                self._solution(block, a, b, shared)

    def _shortest(self, shared: Shared) -> tuple[tuple[State, ...], float]:
        best: dict[State, tuple[float, tuple[State, ...]]] = {(): (0.0, ())}
        for i, block in enumerate(self.graph.blocks):
            step: dict[State, tuple[float, tuple[State, ...]]] = {}
            for after in self.states[i]:
                for before, (seconds, path) in best.items():
                    arriving = self.boundaries.arriving(i, before)
                    total = seconds + self._seconds(block, arriving, after, shared)
                    if after not in step or total < step[after][0]:
                        step[after] = (total, (*path, after))
            best = step
        seconds, path = min(best.values(), key=lambda pair: pair[0])
        return path, seconds

    def _arrivals(self, path: Sequence[State]) -> list[State]:
        before: list[State] = [(), *path[:-1]]
        return [self.boundaries.arriving(i, state) for i, state in enumerate(before)]

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _key(self, block: Block, before: State, after: State, shared: Shared) -> tuple[str, State, State, Shared]:
        return (block.kind, before, after, self._of_block(block, shared))

    def _of_block(self, block: Block, shared: Shared) -> Shared:
        return tuple((name, spec) for name, spec in shared if name in block.parameters)

    def _seconds(self, block: Block, before: State, after: State, shared: Shared) -> float:
        key = self._key(block, before, after, shared)
        if key in self._solved:
            solution = self._solved[key]
            return math.inf if solution is None else solution.seconds
        return self._bound(block, shared)

    def _bound(self, block: Block, shared: Shared) -> float:
        """The block's optimum with free boundaries; kept as the solution of the boundaries it chose."""
        key = (block.kind, self._of_block(block, shared))
        if key not in self._free:
            free = self._solve(block, (None,) * len(block.inputs), (None,) * len(block.outputs), shared)
            self._free[key] = free
            if free is not None:
                self._solved[self._key(block, free.inputs, free.outputs, shared)] = free
        solution = self._free[key]
        return math.inf if solution is None else solution.seconds

    def _solution(self, block: Block, before: State, after: State, shared: Shared) -> Solution | None:
        key = self._key(block, before, after, shared)
        if key not in self._solved:
            self._solved[key] = self._solve(block, before, after, shared)
        return self._solved[key]

    def _solve(
        self, block: Block, before: tuple[Spec | None, ...], after: tuple[Spec | None, ...], shared: Shared
    ) -> Solution | None:
        if block.kind not in self._prices:
            names = frozenset(name for name, _ in shared if name in block.parameters)
            self._prices[block.kind] = BlockPrices(self.graph, block, self.mesh, self.costs, names)
        prices = self._prices[block.kind]
        return solve(Problem(prices, before, after, dict(self._of_block(block, shared)), self.weights))

    def _shared_seconds(self, shared: Shared) -> float:
        total, elements = 0.0, self.weights.element_s
        for name, spec in shared:
            node = self.graph.nodes[name]
            if node.requires_grad:
                cut = math.prod(n for p, n in zip(spec, self.boundaries.sizes.values(), strict=True) if p.is_shard)
                total += (node.meta.numel // cut) * elements
        return total
