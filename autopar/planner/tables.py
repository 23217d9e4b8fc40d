"""The least seconds of one block for every placement of its boundary at once, by elimination.

The same program as :mod:`autopar.planner.intra`: one choice per operator, redistributions that several uses want alike
are paid once. Its tables are laid out once; other weights (another mesh, price of memory or recomputation) are one
product with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product

import numpy as np

from autopar.plan import Layout
from autopar.planner.elimination import Array, Elimination, Minimum
from autopar.planner.prices import BlockPrices, Key, Spec, Weights
from autopar.sharding.resolve import OUTPUT

MOST_JOINED = 20_000  # entries of a table over all uses of one tensor; beyond, wants are gathered use by use


class BlockTables:
    """One block with what may cross its boundary.

    Args:
        prices: of the block.
        inputs, outputs: placements that each may have.
        shared: likewise of parameters that other blocks use too, in the order of the names given.
        charged: those of them that count here.

    Raises:
        TooLarge: the block is too entangled.
    """

    def __init__(
        self,
        prices: BlockPrices,
        inputs: Sequence[tuple[Spec, ...]],
        outputs: Sequence[tuple[Spec, ...]],
        shared: Sequence[tuple[str, tuple[Spec, ...]]] = (),
        charged: frozenset[str] = frozenset(),
    ) -> None:
        self.prices, self.block = prices, prices.block
        self.inputs, self.outputs, self.shared = tuple(inputs), tuple(outputs), tuple(shared)
        self.charged, self.workspace = charged, prices.least_workspace()
        self.sizes: dict[str, int] = {}
        self.scopes: list[tuple[str, ...]] = []
        self._parts: list[Array] = []  # of every table, [*scope, part]
        self._limits: list[Array] = []  # 0, or infinite where impossible
        self.choices = {name: prices.choices(name) for name in prices.nodes}
        self.stored: dict[str, tuple[Spec, ...]] = {}
        self._made: dict[str, tuple[str, tuple[Spec, ...]]] = {}  # producer -> its variable and what it makes
        self._wanted: dict[tuple[str, int], tuple[str, tuple[Key, ...]]] = {}
        self._add_operators()
        self._add_boundary()
        self._add_parameters()
        for producer, uses in prices.uses.items():
            if producer not in prices.single:
                self._add_edges(producer, uses)
        kept = [f"in {i}" for i in range(len(inputs))] + [f"out {i}" for i in range(len(outputs))]
        kept += [f"at {name}" for name, _ in shared]
        self.elimination = Elimination(self.sizes, self.scopes, tuple(kept))
        self._all = np.concatenate([p.reshape(-1, p.shape[-1]) for p in self._parts])
        self._ends = np.cumsum([math.prod(p.shape[:-1]) for p in self._parts])[:-1]

    def least(self, weights: Sequence[Weights]) -> Minimum:
        """The least seconds, ``[weights, *inputs, *outputs, *shared]``; infinite where a boundary cannot be met."""
        vectors = np.stack([w.vector(self.prices.axes) for w in weights], axis=1)
        rows = np.split(self._all @ vectors, self._ends)
        tables = [row.T.reshape(-1, *limit.shape) + limit for row, limit in zip(rows, self._limits, strict=True)]
        return self.elimination.run(tables)

    def layout(self, least: Minimum, case: int, boundary: Sequence[int]) -> Layout:
        """The layout behind one entry of :meth:`least`."""
        values = least.values(case, boundary)
        picked = {name: options[values[f"do {name}"]] for name, options in self.choices.items()}
        stored = {name: options[values[f"at {name}"]] for name, options in self.stored.items()}
        inputs = [options[values[f"in {i}"]] for i, options in enumerate(self.inputs)]
        outputs = [options[values[f"out {i}"]] for i, options in enumerate(self.outputs)]
        return self.prices.layout(picked, inputs, outputs, stored)

    def parts(self, least: Minimum, case: int, boundary: Sequence[int]) -> Array:
        """What the choices behind one entry add up to, by part."""
        values = least.values(case, boundary)
        found = (p[tuple(values[name] for name in scope)] for p, scope in zip(self._parts, self.scopes, strict=True))
        return np.asarray(sum(found))

    # --- variables -----------------------------------------------------------------------------------------------

    def _variable(self, name: str, count: int) -> str:
        self.sizes[name] = count
        return name

    def _add_operators(self) -> None:
        for name, options in self.choices.items():
            variable = self._variable(f"do {name}", len(options))
            self._add((variable,), np.stack([self.prices.operator(name, c) for c in options]))
            if self.prices.graph.nodes[name].outputs:
                self._made[name] = variable, tuple(tuple(s.output for s in c) for c in options)
            for i in range(len(self.prices.graph.nodes[name].inputs)):
                self._wanted[name, i] = variable, tuple(self.prices.key(name, c, i) for c in options)

    def _add_boundary(self) -> None:
        for i, (name, options) in enumerate(zip(self.block.inputs, self.inputs, strict=True)):
            variable = self._variable(f"in {i}", len(options))
            self._made[name] = variable, options
            self._add((variable,), np.stack([self.prices.entering(name, spec) for spec in options]))
        for i, options in enumerate(self.outputs):
            variable = self._variable(f"out {i}", len(options))
            self._wanted[OUTPUT, i] = variable, tuple(tuple((p, False) for p in spec) for spec in options)

    def _add_parameters(self) -> None:
        elsewhere = dict(self.shared)
        for name in self.block.parameters:
            if name in self.prices.single:
                continue
            wanted = [key for use in self.prices.uses.get(name, ()) for key in self._wanted[use][1]]
            options = elsewhere[name] if name in elsewhere else self.prices.stored_as(name, wanted)
            variable = self._variable(f"at {name}", len(options))
            self.stored[name] = options
            self._made[name] = variable, options
            if name not in elsewhere or name in self.charged:
                self._add((variable,), np.stack([self.prices.stored(name, spec) for spec in options]))

    # --- edges ---------------------------------------------------------------------------------------------------

    def _add_edges(self, producer: str, uses: Sequence[tuple[str, int]]) -> None:
        """What a tensor's redistributions take, each wanted one once."""
        variable, made = self._made.get(producer, (f"of {producer}", (self.prices.whole,)))
        self.sizes.setdefault(variable, len(made))
        keys = list(dict.fromkeys(key for use in uses for key in self._wanted[use][1]))
        edges = [[self.prices.edge(producer, spec, key) for key in keys] for spec in made]
        possible = np.array([[edge is not None for edge in row] for row in edges])
        none = np.zeros_like(self._parts[0][0])
        parts = np.array([[none if edge is None else edge for edge in row] for row in edges])
        costly = [bool(parts[:, k].any()) for k in range(len(keys))]
        bit = {key: 1 << i for i, key in enumerate(k for k, c in zip(keys, costly, strict=True) if c)}
        masks: dict[str, list[int]] = {}
        for use in uses:
            consumer, wanted = self._wanted[use]
            columns = [keys.index(key) for key in wanted]
            self._forbid((variable, consumer), possible[:, columns])
            mine = [bit.get(key, 0) for key in wanted]
            masks[consumer] = [a | b for a, b in zip(masks.get(consumer, [0] * len(mine)), mine, strict=True)]
        if not bit:
            return
        priced = parts[:, costly]
        wanting = {name: mask for name, mask in masks.items() if any(mask)}
        if len(made) * math.prod(self.sizes[name] for name in wanting) <= MOST_JOINED or len(wanting) < 3:
            self._join(variable, wanting, priced)
        else:
            self._gather(producer, variable, wanting, priced)

    def _join(self, variable: str, masks: dict[str, list[int]], priced: Array) -> None:
        """One table over the maker and all its readers."""
        grids = np.ix_(*(np.array(mask) for mask in masks.values()))
        joined = np.broadcast_arrays(*grids) if len(grids) > 1 else list(grids)
        wanted = reduce(np.bitwise_or, joined)
        self._add((variable, *masks), _priced(priced, wanted))

    def _gather(self, producer: str, variable: str, masks: dict[str, list[int]], priced: Array) -> None:
        """Reader by reader, a variable holds what is wanted so far."""
        before, known = "", [0]
        for number, (name, mask) in enumerate(masks.items()):
            reached = sorted({a | b for a, b in product(known, mask)})
            now = self._variable(f"want {producer} {number}", len(reached))
            places = np.searchsorted(reached, np.bitwise_or.outer(np.array(known), np.array(mask)))
            allowed = places[..., None] == np.arange(len(reached))
            self._forbid((before, name, now), allowed) if before else self._forbid((name, now), allowed[0])
            before, known = now, reached
        self._add((variable, before), _priced(priced, np.array(known)))

    def _add(self, scope: tuple[str, ...], parts: Array) -> None:
        self.scopes.append(scope)
        self._parts.append(parts)
        self._limits.append(np.zeros(parts.shape[:-1]))

    def _forbid(self, scope: tuple[str, ...], allowed: np.ndarray) -> None:
        if not allowed.all():
            self.scopes.append(scope)
            self._parts.append(np.zeros((*allowed.shape, self._parts[0].shape[-1])))
            self._limits.append(np.where(allowed, 0.0, np.inf))


def _priced(priced: Array, wanted: np.ndarray) -> Array:
    """``[made, *wanted, part]``: the sum of the wanted redistributions.

    Args:
        priced: ``[made, redistribution, part]``.
        wanted: sets of redistributions, as bits.
    """
    bits = (wanted[..., None] >> np.arange(priced.shape[1])) & 1
    return np.asarray(np.einsum("...k,mkp->m...p", bits.astype(float), priced))
