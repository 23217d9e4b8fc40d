"""Placements along the whole chain: dynamic programming over the boundaries between blocks.

The state at a boundary is how its activations are placed. Blocks of one kind between equal boundaries share one
solution, and a pair of boundaries is only solved once the programme's best path goes through it: until then the
block's optimum with free boundaries, a lower bound, stands in for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from autopar.model.graph import Block, OpGraph
from autopar.plan import Layout, Mesh
from autopar.planner.intra import Costs, ParameterCosts, Problem, Solution, Spec, boundary_specs, solve
from autopar.sharding.placement import R
from autopar.sharding.resolve import axis_sizes

State = tuple[Spec, ...]  # placements of the outputs of one block
Shared = tuple[tuple[str, Spec], ...]
MOST_STATES = 64
MOST_SHARED = 32


@dataclass(frozen=True)
class Chain:
    """Layouts of every block, in order.

    Attributes:
        states: placements of each block's outputs.
        seconds: per micro-batch, of all blocks together.
    """

    layouts: tuple[Layout, ...]
    states: tuple[State, ...]
    seconds: float


class ChainSolver:
    """Places all blocks of one model on one mesh at one micro-batch size.

    Args:
        micro_batches: per step.
        price: seconds per byte, weighed against time.
        recompute: every block runs its forward twice.
    """

    def __init__(
        self,
        graph: OpGraph,
        mesh: Mesh,
        costs: Costs,
        parameter_costs: ParameterCosts,
        micro_batches: int,
        price: float = 0.0,
        recompute: bool = False,
    ) -> None:
        self.graph, self.mesh, self.costs, self.parameter_costs = graph, mesh, costs, parameter_costs
        self.micro_batches, self.price, self.recompute = micro_batches, price, recompute
        self.sizes = axis_sizes(mesh)
        self.whole: Spec = (R,) * len(self.sizes)
        self.states = [self._states(i) for i in range(len(graph.blocks))]
        self._solved: dict[tuple[str, State, State, Shared], Solution | None] = {}
        self._free: dict[tuple[str, Shared], Solution | None] = {}

    def lower_bound(self) -> float:
        """Seconds per micro-batch that no layout can beat: every block with the boundaries it likes best."""
        if not self.sizes:
            return self.best().seconds
        return min(
            sum(self._bound(block, shared) for block in self.graph.blocks) + self._shared_seconds(shared)
            for shared in self._shared_options()
        )

    def best(self) -> Chain:
        """The cheapest layouts."""
        found = [chain for shared in self._shared_options() if (chain := self._best(shared)) is not None]
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
                    arriving = self.arriving(i, before)
                    total = seconds + self._seconds(block, arriving, after, shared)
                    if after not in step or total < step[after][0]:
                        step[after] = (total, (*path, after))
            best = step
        seconds, path = min(best.values(), key=lambda pair: pair[0])
        return path, seconds

    # --- states ---------------------------------------------------------------------------------------------------

    def _states(self, index: int) -> tuple[State, ...]:
        """What the DP may choose after a block: outputs that only the next block reads are free, others replicated."""
        block, later = self.graph.blocks[index], self.graph.blocks[index + 2 :]
        lasting = {name for b in later for name in b.inputs}
        options: list[tuple[Spec, ...]] = []
        count = 1
        for name in block.outputs:
            specs = (self.whole,) if name in lasting else boundary_specs(self.graph, name, self.sizes)
            if count * len(specs) > MOST_STATES:
                specs = (self.whole,)
            count *= len(specs)
            options.append(specs)
        return tuple(product(*options))

    def arriving(self, index: int, before: State) -> State:
        """Placements of a block's inputs, given those of the outputs of the block before."""
        if index == 0:
            return tuple(self.whole for _ in self.graph.blocks[0].inputs)
        made = dict(zip(self.graph.blocks[index - 1].outputs, before, strict=True))
        return tuple(made.get(name, self.whole) for name in self.graph.blocks[index].inputs)

    def _arrivals(self, path: Sequence[State]) -> list[State]:
        before: list[State] = [(), *path[:-1]]
        return [self.arriving(i, state) for i, state in enumerate(before)]

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
        problem = Problem(
            self.graph,
            block,
            self.mesh,
            before,
            after,
            shared=dict(self._of_block(block, shared)),
            micro_batches=self.micro_batches,
            price=self.price,
            recompute=self.recompute,
        )
        return solve(problem, self.costs, self.parameter_costs)

    # --- parameters that several blocks share ---------------------------------------------------------------------

    def _shared_options(self) -> tuple[Shared, ...]:
        """Every placement of the parameters that several blocks use; buffers, and what goes beyond the count, are R."""
        users: dict[str, int] = {}
        for block in self.graph.blocks:
            for name in block.parameters:
                users[name] = users.get(name, 0) + 1
        names, options, count = [n for n, k in users.items() if k > 1], [], 1
        for name in names:
            specs: tuple[Spec, ...] = (self.whole,)
            if self.graph.nodes[name].kind == "parameter":
                specs = boundary_specs(self.graph, name, self.sizes)
            if count * len(specs) > MOST_SHARED:
                specs = (self.whole,)
            count *= len(specs)
            options.append(specs)
        return tuple(tuple(zip(names, chosen, strict=True)) for chosen in product(*options))

    def _shared_seconds(self, shared: Shared) -> float:
        total = 0.0
        for name, spec in shared:
            node = self.graph.nodes[name]
            if node.requires_grad:
                cut = math.prod(n for p, n in zip(spec, self.sizes.values(), strict=True) if p.is_shard)
                seconds, nbytes = self.parameter_costs.step(node, node.meta.numel // cut)
                total += seconds / self.micro_batches + nbytes * self.price
        return total
