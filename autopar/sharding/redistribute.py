"""Redistribution of a tensor between two placements, and the collectives it costs forward and backward.

The gradient of a tensor is placed as the tensor is: sharded alike, replicated for a replicated tensor and for a
partial sum. An operator that reads a replicated operand beside sharded ones hands back a partial gradient; the
conversion that fed it sums that up (the f and g operators of Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053,
section 3; with a sequence-sharded tensor, the all-gather and reduce-scatter of Korthikanti et al. 2022, arXiv
2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.sharding.placement import P, Placement, R


@dataclass(frozen=True)
class Conversion:
    """From ``src`` to ``dst`` on one axis.

    Attributes:
        grad_partial: the consumers' gradient arrives as a partial sum (only with ``dst`` R).
        requires_grad: whether a gradient flows back at all.
    """

    src: Placement
    dst: Placement
    grad_partial: bool = False
    requires_grad: bool = True

    def __post_init__(self) -> None:
        if self.dst == P and self.src != P:
            raise PlanError(f"a tensor placed {self.src} cannot become a partial sum", "Use R or S(d)")

    @property
    def forward(self) -> str | None:
        """Collective of the forward pass, or None where it is local."""
        if self.src == self.dst or self.src == R:
            return None
        if self.src == P:
            return "all_reduce" if self.dst == R else "reduce_scatter"
        return "all_gather" if self.dst == R else "all_to_all"

    @property
    def backward(self) -> str | None:
        """Collective of the backward pass, or None where it is local."""
        if not self.requires_grad:
            return None
        if self.dst == R:
            if not self.grad_partial:
                return None
            return "reduce_scatter" if self.src.is_shard else "all_reduce"
        if self.src == self.dst:
            return None
        return "all_to_all" if self.src.is_shard else "all_gather"

    @property
    def is_identity(self) -> bool:
        """Nothing happens in either direction."""
        return self.src == self.dst and not (self.grad_partial and self.requires_grad)
