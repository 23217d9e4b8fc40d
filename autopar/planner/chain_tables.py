"""All blocks of the chain as matrices over the placements at their boundaries.

The state after a block is how its outputs are placed; a matrix gives, for the states before and after, the least
seconds of the block, for several weights at once. Blocks alike share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from autopar.model.graph import OpGraph
from autopar.plan import Layout, Mesh
from autopar.planner.elimination import Array, Minimum
from autopar.planner.prices import BlockPrices, Costs, Spec, Weights, boundary_specs
from autopar.planner.tables import BlockTables
from autopar.sharding.placement import R
from autopar.sharding.resolve import axis_sizes

State = tuple[Spec, ...]  # placements of the outputs of one block
Shared = tuple[tuple[str, Spec], ...]
MOST_STATES = 64
MOST_SHARED = 32


@dataclass(frozen=True)
class Slot:
    """What makes blocks alike for placement.

    Attributes:
        inputs, outputs: placements that each may have.
        before: of every input, the position of the output of the block before that it is, or -1 where it always
            arrives whole.
        keeps_inputs: per input, whether what is kept of it counts here.
        charged: parameters that several blocks use and that count here.
    """

    kind: str
    inputs: tuple[tuple[Spec, ...], ...]
    outputs: tuple[tuple[Spec, ...], ...]
    before: tuple[int, ...]
    entering: tuple[tuple[Spec, ...], ...]
    keeps_inputs: tuple[bool, ...]
    charged: tuple[str, ...]


class Boundaries:
    """What may cross between blocks on some inner mesh axes, and how parameters that several blocks use may lie."""

    def __init__(self, graph: OpGraph, mesh: Mesh) -> None:
        self.graph, self.sizes = graph, axis_sizes(mesh)
        self.whole: Spec = (R,) * len(self.sizes)
        self.outputs = [self._outputs(i) for i in range(len(graph.blocks))]
        self.states: list[tuple[State, ...]] = [tuple(product(*options)) for options in self.outputs]
        self.shared = self._shared()

    def _outputs(self, index: int) -> tuple[tuple[Spec, ...], ...]:
        """Outputs that only the next block reads are free, others replicated."""
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
        return tuple(options)

    def arriving(self, index: int, before: State) -> State:
        """Placements of a block's inputs, given those of the outputs of the block before."""
        if index == 0:
            return tuple(self.whole for _ in self.graph.blocks[0].inputs)
        made = dict(zip(self.graph.blocks[index - 1].outputs, before, strict=True))
        return tuple(made.get(name, self.whole) for name in self.graph.blocks[index].inputs)

    def _shared(self) -> tuple[Shared, ...]:
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


class ChainTables:
    """The blocks of one model at one micro-batch size on meshes whose inner axes lie alike.

    Args:
        mesh: any of these meshes.

    Raises:
        TooLarge: a block is too entangled.
    """

    def __init__(self, graph: OpGraph, mesh: Mesh, costs: Costs) -> None:
        self.graph, self.blocks, self.mesh, self.costs = graph, graph.blocks, mesh, costs
        self.boundaries = Boundaries(graph, mesh)
        self.sizes = self.boundaries.sizes
        self._own_saves = self._saved_by_maker()
        self.kinds: list[Slot] = []
        self.slots: list[int] = []  # of every block, its kind
        numbers: dict[Slot, int] = {}
        self._tables: list[BlockTables] = []
        seen_inputs: set[str] = set()
        seen_shared: set[str] = set()
        for index in range(len(self.blocks)):
            slot = self._slot(index, seen_inputs, seen_shared)
            if slot not in numbers:
                numbers[slot] = len(numbers)
                self.kinds.append(slot)
                self._tables.append(self._table(index, slot))
            self.slots.append(numbers[slot])

    def _slot(self, index: int, seen_inputs: set[str], seen_shared: set[str]) -> Slot:
        block = self.blocks[index]
        before = list(self.blocks[index - 1].outputs) if index else []
        entering = self.boundaries.outputs[index - 1] if index else ()
        places = tuple(before.index(name) if name in before else -1 for name in block.inputs)
        whole = (self.boundaries.whole,)
        keeps = tuple(name not in seen_inputs and name not in self._own_saves for name in block.inputs)
        shared = {name for name, _ in self.boundaries.shared[0]}
        charged = tuple(name for name in block.parameters if name in shared and name not in seen_shared)
        seen_inputs.update(block.inputs)
        seen_shared.update(charged)
        inputs = tuple(entering[place] if place >= 0 else whole for place in places)
        return Slot(block.kind, inputs, self.boundaries.outputs[index], places, entering, keeps, charged)

    def _saved_by_maker(self) -> frozenset[str]:
        """Block outputs that the block itself keeps."""
        found = set()
        for block in self.blocks:
            saved = {s.source for name in block.nodes for s in self.graph.nodes[name].saved}
            found |= {n for n in block.outputs if n in saved or self.graph.nodes[n].alias_of in saved}
        return frozenset(found)

    def _table(self, index: int, slot: Slot) -> BlockTables:
        block = self.blocks[index]
        names = [name for name, _ in self.boundaries.shared[0] if name in block.parameters]
        options = [tuple(dict.fromkeys(dict(one)[name] for one in self.boundaries.shared)) for name in names]
        prices = BlockPrices(self.graph, block, self.mesh, self.costs, frozenset(names), slot.keeps_inputs)
        return BlockTables(
            prices, slot.inputs, slot.outputs, tuple(zip(names, options, strict=True)), frozenset(slot.charged)
        )

    def least(self, weights: Sequence[Weights]) -> list[Minimum]:
        """Of every kind of block, for every weight, input, output and shared placement."""
        return [table.least(weights) for table in self._tables]

    def matrix(self, index: int, least: Minimum, shared: Shared) -> Array:
        """``[weights, state before, state after]`` of one block."""
        slot = self.kinds[self.slots[index]]
        chosen: Any = (..., *self._at(index, shared))
        table = least.table[chosen]
        cases, ins = table.shape[0], len(slot.inputs)
        table = table.reshape(*table.shape[: 1 + ins], -1)
        entering = list(product(*(range(len(options)) for options in slot.entering)))
        picks = [np.array([state[p] if p >= 0 else 0 for state in entering], dtype=int) for p in slot.before]
        if not picks:
            return np.broadcast_to(table[:, None, :], (cases, len(entering), table.shape[-1]))
        picked: Any = (slice(None), *picks)
        return np.asarray(table[picked])

    def _at(self, index: int, shared: Shared) -> tuple[int, ...]:
        table, chosen = self._tables[self.slots[index]], dict(shared)
        return tuple(options.index(chosen[name]) for name, options in table.shared)

    def layout(
        self, index: int, least: Minimum, case: int, before: int, after: int, shared: Shared
    ) -> tuple[Layout, Array]:
        """The layout behind one entry of :meth:`matrix`, and what it adds up to by part."""
        slot = self.kinds[self.slots[index]]
        shape = [len(options) for options in slot.entering]
        entering = np.unravel_index(before, shape) if shape else ()
        inputs = [int(entering[p]) if p >= 0 else 0 for p in slot.before]
        outputs = [int(i) for i in np.unravel_index(after, [len(o) for o in slot.outputs])] if slot.outputs else []
        boundary = (*inputs, *outputs, *self._at(index, shared))
        table = self._tables[self.slots[index]]
        # blocks of one kind have one layout; its names are labels, alike in all of them
        return table.layout(least, case, boundary), table.parts(least, case, boundary)

    @cached_property
    def workspaces(self) -> Array:
        """Bytes that the largest operator of blocks a..b-1 needs at least, ``[a, b]``."""
        each = np.array([self._tables[kind].workspace for kind in self.slots])
        found = np.zeros((len(each), len(each) + 1))
        for a in range(len(each)):
            found[a, a + 1 :] = np.maximum.accumulate(each[a:])
        return found

    @cached_property
    def least_kept(self) -> list[float]:
        """Bytes that a block of every kind keeps for backward at least."""
        only = [Weights(forward=0.0, backward=0.0, kept_s=1.0, made_s=0.0)]
        return [float(found.table.min()) for found in self.least(only)]
