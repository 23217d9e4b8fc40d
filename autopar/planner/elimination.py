"""Minimising a sum of tables over finite variables, exactly: one variable is eliminated after the other.

Nonserial dynamic programming (Bertele and Brioschi 1972), also known as bucket elimination (Dechter 1999): all tables
that mention a variable are summed and replaced by their minimum over it. What it takes grows with the largest such
sum, which is small for graphs that are nearly chains, as the blocks of neural networks are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
        self.sizes, self.kept, self.most = dict(sizes), kept, most
        self.scopes = list(scopes)
        self.steps: list[_Step] = []
        alive = dict(enumerate(self.scopes))
        left = [name for name in self.sizes if name not in kept]
        while left:
            variable = min(left, key=lambda name: (self._entries(alive, name), left.index(name)))
            left.remove(variable)
            tables = tuple(i for i, scope in alive.items() if variable in scope)
            others = [name for name in self._joined(alive[i] for i in tables) if name != variable]
            self._check((*others, variable))
            self.steps.append(_Step(tables, (*others, variable)))
            for i in tables:
                del alive[i]
            alive[len(self.scopes)] = tuple(others)
            self.scopes.append(tuple(others))
        self._check(kept)
        self.rest = tuple(alive)

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
        return Minimum(self._sum(alive, self.rest, self.kept), tuple(self.steps), tuple(best), self.kept)

    def _sum(self, alive: Sequence[Array], indices: Sequence[int], scope: tuple[str, ...]) -> Array:
        shape = tuple(self.sizes[name] for name in scope)
        total: Array = np.zeros((1, *shape))
        for i in indices:
            mine = self.scopes[i]
            order = [0, *(1 + mine.index(name) for name in scope if name in mine)]
            wide = (alive[i].shape[0], *(self.sizes[name] if name in mine else 1 for name in scope))
            total = total + alive[i].transpose(order).reshape(wide)
        return total

    def _entries(self, alive: Mapping[int, tuple[str, ...]], variable: str) -> int:
        return math.prod(self.sizes[n] for n in self._joined(s for s in alive.values() if variable in s))

    @staticmethod
    def _joined(scopes: Iterable[tuple[str, ...]]) -> list[str]:
        found: dict[str, None] = {}
        for scope in scopes:
            found.update(dict.fromkeys(scope))
        return list(found)

    def _check(self, scope: Sequence[str]) -> None:
        if math.prod(self.sizes[name] for name in scope) > self.most:
            raise TooLarge
