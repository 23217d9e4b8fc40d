"""Strategy: how one operator is spread over one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.sharding.placement import Placement, parse


@dataclass(frozen=True)
class Internal:
    """A collective that an operator makes inside itself (vocabulary-parallel cross entropy).

    Attributes:
        kind: ``all_reduce``, ...
        shape: of the tensor as one device holds it after the collective.
        itemsize: bytes per element.
        direction: ``forward`` or ``backward``.
    """

    kind: str
    shape: tuple[int, ...]
    itemsize: int
    direction: str


@dataclass(frozen=True)
class Strategy:
    """Placements of an operator's operands and results on one mesh axis.

    Attributes:
        inputs: placement that each tensor operand must have, aligned with ``OpNode.inputs``.
        output: placement of its result (of every result, where there are several).
        grad_partial: per operand, whether the gradient that the operator's backward gives is a partial sum over the
            axis (the operand is replicated, but each device works with another shard of the rest).
        internal: collectives that the operator makes by itself.

    The text form, ``str(strategy)``, is what plans hold: ``"S(2) S(1) R -> P"``.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    grad_partial: tuple[bool, ...] = field(default=(), compare=False)
    internal: tuple[Internal, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{' '.join(map(str, self.inputs))} -> {self.output}".strip()

    @property
    def is_replicated(self) -> bool:
        return self.output.kind == "R" and all(p.kind == "R" for p in self.inputs)


def parse_strategy(text: str) -> Strategy:
    """Reads the text form.

    Raises:
        PlanError: it has no arrow or an unknown placement.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise PlanError(f"strategy {text!r} has no '->'", "Write operands -> result, for example 'S(2) S(1) R -> P'")
    return Strategy(tuple(parse(p) for p in left.split()), parse(right.strip()))
