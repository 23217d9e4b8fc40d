"""Placement of one tensor on one mesh axis: replicated ``R``, sharded ``S(d)`` or a partial sum ``P``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autopar.errors import PlanError


@dataclass(frozen=True, order=True)
class Placement:
    """One of R, S(dim), P; the counterparts of DTensor's Replicate(), Shard(dim), Partial("sum")."""

    kind: str
    dim: int = -1

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"


R = Placement("R")
P = Placement("P")


def S(dim: int) -> Placement:  # noqa: N802  (the field's notation)
    """Sharded on dimension ``dim`` (counted from 0)."""
    return Placement("S", dim)


def parse(text: str) -> Placement:
    """Reads ``R``, ``P`` or ``S(d)``.

    Raises:
        PlanError: the text is none of them.
    """
    if text in ("R", "P"):
        return Placement(text)
    match = re.fullmatch(r"S\((\d+)\)", text)
    if not match:
        raise PlanError(f"placement {text!r} is unknown", "Use R, P or S(dimension), for example S(0)")
    return S(int(match[1]))


def local_shape(shape: tuple[int, ...], placements: list[tuple[Placement, int]]) -> tuple[int, ...]:
    """Shape of one device's part.

    Args:
        shape: the global shape.
        placements: (placement, size of the mesh axis) pairs.

    Raises:
        PlanError: a sharded dimension does not divide.
    """
    local = list(shape)
    for placement, size in placements:
        if placement.is_shard and size > 1:
            if placement.dim >= len(local) or local[placement.dim] % size:
                raise PlanError(
                    f"{placement} cannot split a tensor of shape {tuple(shape)} over {size} devices",
                    "Choose a dimension that the number of devices divides",
                )
            local[placement.dim] //= size
    return tuple(local)


def shard_factor(placements: list[tuple[Placement, int]]) -> int:
    """By how much a device's part is smaller than the whole."""
    factor = 1
    for placement, size in placements:
        factor *= size if placement.is_shard else 1
    return factor
