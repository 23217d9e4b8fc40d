"""Factors: the named dimensions of an operator, from which its strategies follow.

An operator is written like an einsum: every dimension of every operand and result has a factor (or None where it
must stay whole). To spread the operator over a mesh axis is to choose one factor: tensors that have it are sharded on
that dimension, tensors that lack it are replicated, and a result that sums over it is partial. The idea is that of
sharding rules in GSPMD (Xu et al. 2021, arXiv 2105.04663) and Shardy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopar.sharding.placement import P, Placement, R, S
from autopar.sharding.strategy import Internal, Strategy

Dims = tuple[str | None, ...]


@dataclass(frozen=True)
class Factors:
    """The factor rule of one operator.

    Attributes:
        inputs: factors of each operand's dimensions, aligned with ``OpNode.inputs``.
        output: factors of the result's dimensions.
        sizes: how many equal parts each factor can be cut into (its extent).
        sums: factors that the operator sums over, so that a sharded one gives a partial result.
        linear: operands in which the operator is linear and through which partial sums pass (all of them at once).
        replicated_grad: (factor, operand) pairs whose operand lacks the factor and yet gets a whole gradient
            (the bias of a product split on its inner dimension).
        internal: collectives made inside, per factor.
        whole_output: factors whose result is whole in spite of sharding, since the operator reduces inside.
    """

    inputs: tuple[Dims, ...]
    output: Dims
    sizes: dict[str, int]
    sums: frozenset[str] = frozenset()
    linear: bool = False
    replicated_grad: frozenset[tuple[str, int]] = frozenset()
    internal: dict[str, tuple[Internal, ...]] = field(default_factory=dict)
    whole_output: frozenset[str] = frozenset()


def _on(dims: Dims, factor: str) -> Placement:
    return S(dims.index(factor)) if factor in dims else R


def expand_factors(rule: Factors, size: int, needs_grad: Sequence[bool]) -> tuple[Strategy, ...]:
    """All strategies on one axis.

    Args:
        rule: the operator's factors.
        size: devices on the axis; factors that it does not divide are left out.
        needs_grad: per operand, whether it wants a gradient.

    Returns:
        The replicated strategy first, then one per factor, then the pass-through of partial sums.
    """
    count = len(rule.inputs)
    found = {replicated(count): None}
    for factor, extent in rule.sizes.items():
        if size <= 1 or extent % size or not any(factor in dims for dims in rule.inputs):
            continue
        inputs = tuple(_on(dims, factor) for dims in rule.inputs)
        if factor in rule.output:
            output = _on(rule.output, factor)
        elif factor in rule.whole_output:
            output = R
        elif factor in rule.sums:
            output = P
        else:
            continue
        partial = tuple(
            needs_grad[i] and inputs[i] == R and (factor, i) not in rule.replicated_grad for i in range(count)
        )
        found.setdefault(Strategy(inputs, output, partial, rule.internal.get(factor, ())), None)
    if rule.linear and size > 1 and count:
        found.setdefault(Strategy((P,) * count, P, (False,) * count), None)
    return tuple(found)


def replicated(count: int) -> Strategy:
    """Every operand and the result whole on every device."""
    return Strategy((R,) * count, R, (False,) * count)


def view_factors(source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors of a reshape: which dimension of the target a shard of the source becomes.

    Dimensions are grouped where running products agree; in a group, a contiguous cut of the leading dimension (the
    first above 1) of the source is a contiguous cut of the leading dimension of the target.

    Returns:
        Factors of the source, factors of the target, extents (the greatest common divisor of the two leading sizes).
    """
    from math import gcd

    inputs: list[str | None] = [None] * len(source)
    outputs: list[str | None] = [None] * len(target)
    sizes: dict[str, int] = {}
    i = j = 0
    while i < len(source) and j < len(target):
        i0, j0, left, right = i, j, source[i], target[j]
        while left != right:
            if left < right:
                i += 1
                if i >= len(source):
                    return tuple(inputs), tuple(outputs), sizes
                left *= source[i]
            else:
                j += 1
                if j >= len(target):
                    return tuple(inputs), tuple(outputs), sizes
                right *= target[j]
        lead_in = next((k for k in range(i0, i + 1) if source[k] > 1), None)
        lead_out = next((k for k in range(j0, j + 1) if target[k] > 1), None)
        if lead_in is not None and lead_out is not None:
            name = f"d{lead_out}"
            inputs[lead_in] = outputs[lead_out] = name
            sizes[name] = gcd(source[lead_in], target[lead_out])
        i, j = i + 1, j + 1
    return tuple(inputs), tuple(outputs), sizes
