"""Minimising a sum of tables over finite variables, exactly: one variable is eliminated after the other.

Nonserial dynamic programming (Bertele and Brioschi 1972), also known as bucket elimination (Dechter 1999): all tables
that mention a variable are summed and replaced by their minimum over it. What it takes grows with the largest such
sum, which is small for graphs that are nearly chains, as the blocks of neural networks are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_ENTRIES = 1_000_000  # of one table


class TooLarge(Exception):
    """A table would have more entries than it may."""


@dataclass(frozen=True)
class _Step:
    """Tables that are summed over ``scope`` and minimised over its last variable."""

    tables: tuple[int, ...]
    scope: tuple[str, ...]


@dataclass(frozen=True)
class Minimum:
    """The least sum for every value of the kept variables.

    Attributes:
        table: ``[case, *kept]``.
    """

    table: Array
    steps: tuple[_Step, ...]
    best: tuple[NDArray[np.intp], ...]
    kept: tuple[str, ...]

    def values(self, case: int, kept: Sequence[int]) -> dict[str, int]:
        """The values of all variables that give ``table[case, *kept]``."""
        found = dict(zip(self.kept, kept, strict=True))
        for step, best in zip(reversed(self.steps), reversed(self.best), strict=True):
            *others, variable = step.scope
            row = best[min(case, len(best) - 1)]
            found[variable] = int(row[tuple(found[name] for name in others)])
        return found


class Elimination:
    """An order in which variables are eliminated, made once for tables that keep their scopes.

    Args:
        sizes: number of values of every variable.
        scopes: of every table, its variables.
        kept: variables that stay.
        most: entries that a table may have.

    Raises:
        TooLarge: no cheap order was found.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        scopes: Sequence[tuple[str, ...]],
        kept: tuple[str, ...],
        most: int = MOST_ENTRIES,
    ) -> None:
        self.sizes, self.kept = dict(sizes), kept
        self.steps, self.scopes, self.rest = _order(tuple(sizes.items()), tuple(scopes), kept)
        for scope in (*(step.scope for step in self.steps), kept):
            if math.prod(self.sizes[name] for name in scope) > most:
                raise TooLarge

    def run(self, tables: Sequence[Array]) -> Minimum:
        """Eliminates.

        Args:
            tables: ``[case, *scope]`` each; one of a single case holds for all.
        """
        alive, best = list(tables), []
        for step in self.steps:
            total = self._sum(alive, step.tables, step.scope)
            found = total.argmin(axis=-1)
            best.append(found)
            alive.append(np.take_along_axis(total, found[..., None], axis=-1)[..., 0])
        return Minimum(self._sum(alive, self.rest, self.kept), self.steps, tuple(best), self.kept)

    def _sum(self, alive: Sequence[Array], indices: Sequence[int], scope: tuple[str, ...]) -> Array:
        shape = tuple(self.sizes[name] for name in scope)
        total: Array = np.zeros((1, *shape))
        for i in indices:
            mine = self.scopes[i]
            order = [0, *(1 + mine.index(name) for name in scope if name in mine)]
            wide = (alive[i].shape[0], *(self.sizes[name] if name in mine else 1 for name in scope))
            total = total + alive[i].transpose(order).reshape(wide)
        return total


@lru_cache(maxsize=512)
def _order(
    sizes: tuple[tuple[str, int], ...], scopes: tuple[tuple[str, ...], ...], kept: tuple[str, ...]
) -> tuple[tuple[_Step, ...], tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Steps that each take the variable whose table is smallest; all scopes, those of results at the end; what is left.

    Blocks alike in structure, at other batch or mesh sizes, often share it.
    """
    extents, every, steps = dict(sizes), list(scopes), []
    of: dict[str, set[int]] = {name: set() for name in extents}  # tables alive that mention a variable
    for i, scope in enumerate(scopes):
        for name in scope:
            of[name].add(i)
    alive = set(range(len(scopes)))

    def joined(name: str) -> list[str]:
        return list(dict.fromkeys(other for i in sorted(of[name]) for other in every[i]))

    def entries(name: str) -> int:
        return math.prod(extents[other] for other in joined(name))

    left = {name: entries(name) for name in extents if name not in kept}
    while left:
        variable = min(left, key=left.__getitem__)
        del left[variable]
        tables = tuple(sorted(of[variable]))
        others = [name for name in joined(variable) if name != variable]
        steps.append(_Step(tables, (*others, variable)))
        alive.difference_update(tables)
        alive.add(len(every))
        for name in others:
            of[name].difference_update(tables)
            of[name].add(len(every))
        every.append(tuple(others))
        left.update((name, entries(name)) for name in others if name in left)
    return tuple(steps), tuple(every), tuple(sorted(alive))
