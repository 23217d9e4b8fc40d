"""What each block may do: layouts with what they take in time and memory, each with and without recomputation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from autopar.cost.block import BlockCost
from autopar.cost.engine import Engine
from autopar.cost.memory import FP32, OPTIMIZER_STATES
from autopar.errors import PlanError
from autopar.model.graph import Block, OpGraph
from autopar.plan import Layout, Mesh
from autopar.planner.chain_tables import State
from autopar.planner.parameters import StepCosts
from autopar.planner.prices import Choice, Spec, choices_of
from autopar.sharding.placement import R
from autopar.sharding.resolve import axis_sizes

MOST_ENUMERATED = 1500  # layouts of one block under one boundary


@dataclass(frozen=True)
class Option:
    """One way to run one block.

    Attributes:
        before, after: placements of what it reads from the block before and of what it makes.
        seconds: per micro-batch, forward and backward, with its share of what happens once a step.
        fixed_bytes: parameters, gradients, optimizer states and what is frozen.
        kept_bytes: activations per micro-batch, its inputs apart.
        kept_inputs: bytes of each input that it keeps per micro-batch.
        kept_outputs: for each output, whether ``kept_bytes`` holds it.
        workspace_bytes, again_bytes: while it runs; while it runs again.
    """

    layout: Layout
    recompute: bool
    before: State
    after: State
    seconds: float
    fixed_bytes: float
    kept_bytes: float
    kept_inputs: tuple[float, ...]
    kept_outputs: tuple[bool, ...]
    workspace_bytes: float
    again_bytes: float

    @property
    def measures(self) -> tuple[float, ...]:
        """What is to be small."""
        kept = self.kept_bytes + sum(self.kept_inputs)
        return (self.seconds, self.fixed_bytes, kept, self.workspace_bytes, self.again_bytes)


class OptionMaker:
    """Makes the options of blocks on one mesh."""

    def __init__(
        self, engine: Engine, graph: OpGraph, mesh: Mesh, micro_batches: int, costs: StepCosts, modes: Sequence[bool]
    ) -> None:
        self.engine, self.graph, self.mesh, self.micro_batches = engine, graph, mesh, micro_batches
        self.costs, self.modes = costs, modes
        self.sizes = axis_sizes(mesh)
        self._every: dict[tuple[str, State, State], list[Option]] = {}

    def of_layout(self, block: Block, before: State, after: State, layout: Layout) -> Iterator[Option]:
        """The options of one layout: kept, recomputed, or both, as ``modes`` says.

        Raises:
            PlanError: the layout is not possible.
        """
        cost = self.engine.block_cost(self.graph, block, layout, self.mesh)
        for recompute in self.modes:
            yield self._option(layout, recompute, before, after, cost)

    def _option(self, layout: Layout, recompute: bool, before: State, after: State, cost: BlockCost) -> Option:
        forward = cost.forward_s + cost.communication("forward")
        seconds = forward * (2 if recompute else 1) + cost.backward_s + cost.communication("backward")
        elements = sum(cost.parameter_elements)
        once = FP32 * elements * self.costs.seconds_per_byte
        once += sum(self.costs.reduction(axis) * (n // FP32) for axis, n in cost.step_reduction_bytes.items())
        held = -(-elements // self.costs.divided)
        return Option(
            layout=layout,
            recompute=recompute,
            before=before,
            after=after,
            seconds=seconds + once / self.micro_batches,
            fixed_bytes=FP32 * (2 + OPTIMIZER_STATES) * held + cost.frozen_bytes,
            kept_bytes=0 if recompute else cost.saved_bytes,
            kept_inputs=tuple(cost.input_bytes if recompute else cost.saved_input_bytes),
            kept_outputs=tuple(False for _ in cost.saved_outputs) if recompute else cost.saved_outputs,
            workspace_bytes=cost.workspace_bytes,
            again_bytes=cost.saved_bytes if recompute else 0,
        )

    def is_small(self, block: Block) -> bool:
        """Whether all its layouts can be tried; parameters that several uses share are left to the program."""
        uses = [p for n in block.nodes for p in self.graph.nodes[n].inputs if p in block.parameters]
        if len(uses) != len(set(uses)):
            return False
        return math.prod(len(c) for c in self._choices(block)) <= MOST_ENUMERATED

    def every(self, block: Block, before: State, after: State) -> list[Option]:
        """All options under one boundary that no other beats in everything."""
        key = (block.kind, before, after)
        if key not in self._every:
            found: list[Option] = []
            for layout in self._layouts(block, before, after):
                try:
                    found.extend(self.of_layout(block, before, after, layout))
                except PlanError:  # placements that cannot follow each other
                    continue
            self._every[key] = undominated(found)
        return self._every[key]

    def _choices(self, block: Block) -> list[tuple[Choice, ...]]:
        return [choices_of(self.graph, self.graph.nodes[name], self.sizes) for name in block.nodes]

    def _layouts(self, block: Block, before: State, after: State) -> Iterator[Layout]:
        for chosen in product(*self._choices(block)):
            operators = {
                label: dict(zip(self.sizes, map(str, choice), strict=True))
                for label, choice in zip(block.labels, chosen, strict=True)
                if not all(s.is_replicated for s in choice)
            }
            yield Layout(
                operators=operators,
                inputs=[self._named(spec) for spec in before],
                outputs=[self._named(spec) for spec in after],
            )

    def _named(self, spec: Spec) -> dict[str, str]:
        return {axis: str(p) for axis, p in zip(self.sizes, spec or (R,) * len(self.sizes), strict=True)}


def undominated(options: Iterable[Option]) -> list[Option]:
    """Options that no other is at most equal to in every measure; the first of equal ones."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: o.measures):
        mine = option.measures
        if not any(
            all(a <= b for a, b in zip(other.measures, mine, strict=True)) and other.kept_outputs == option.kept_outputs
            for other in kept
        ):
            kept.append(option)
    return kept
