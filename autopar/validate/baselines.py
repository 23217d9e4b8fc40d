"""Two plain models of step time, to show what a finer one gains: arithmetic at peak rate, and a perfect roofline."""

from __future__ import annotations

from autopar.cost.estimate import Estimate
from autopar.validate.rows import Row


def model_flops_s(row: Row, estimate: Estimate) -> float:
    """Seconds of the arithmetic that a run must do, at the peak rate: model FLOPs, and the forward again where whole
    blocks are recomputed (a third more)."""
    again = 4 / 3 if row.recompute == "full" else 1.0
    return again * estimate.flops / row.gpus / estimate.peak_flops


def roofline_s(row: Row, estimate: Estimate) -> float:
    """The pure roofline: arithmetic at the peak rate, or the states' memory traffic, whichever is longer."""
    return max(model_flops_s(row, estimate), estimate.breakdown["optimizer"])
