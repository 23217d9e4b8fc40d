"""Streams: compute and communication of FSDP units running beside each other, prefetched one unit ahead.

Zhao et al. 2023, "PyTorch FSDP" (arXiv 2304.11277), sections 3.3 and 3.4: forward gathers the next unit while this one
computes; backward gathers the unit before and reduces the gradients of the unit after.
"""

from __future__ import annotations

from collections.abc import Sequence


def forward_pass(compute: Sequence[float], gather: Sequence[float]) -> float:
    """Seconds of a forward pass over units, in order.

    Args:
        compute: of each unit.
        gather: all-gather of each unit's parameters; starts at the earliest when the unit before it starts computing.
    """
    wire = done = started = 0.0
    for busy, fetch in zip(compute, gather, strict=True):
        wire = max(wire, started) + fetch
        started = max(done, wire)
        done = started + busy
    return done


def backward_pass(compute: Sequence[float], gather: Sequence[float], reduce: Sequence[float]) -> float:
    """Seconds of a backward pass over units given in backward order.

    The wire carries, in order: the gather of the first, then for each unit the gather of the next one and, once its
    gradients are made, their reduction.
    """
    if not compute:
        return 0.0
    wire = gather[0]
    started = wire
    done = started + compute[0]
    for i in range(1, len(compute)):
        wire = max(wire, started) + gather[i]  # prefetched when the unit before starts
        arrived = wire
        wire = max(wire, done) + reduce[i - 1]
        started = max(done, arrived)
        done = started + compute[i]
    return max(done, max(wire, done) + reduce[-1])
