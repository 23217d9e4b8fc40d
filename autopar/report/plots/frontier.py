"""Frontier: throughput against memory of all plans, and those that no other beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from autopar.report.plots.style import BLUE, GREY, figure, legend_below


def frontier(plans: pd.DataFrame) -> Figure:
    """Points of plans, the frontier as steps.

    Args:
        plans: columns ``mesh``, ``peak_reserved_gib``, ``tokens_per_s``, ``memory_limit_gib``; a row a plan.
    """
    made, axes = figure()
    axes.scatter(plans["peak_reserved_gib"], plans["tokens_per_s"], color=GREY, s=25, label="plans")
    best = undominated(plans)
    axes.step(best["peak_reserved_gib"], best["tokens_per_s"], where="post", color=BLUE, marker="o", label="frontier")
    for mesh, memory, speed in zip(best["mesh"], best["peak_reserved_gib"], best["tokens_per_s"], strict=True):
        axes.annotate(str(mesh), (memory, speed), xytext=(4, -10), textcoords="offset points", fontsize=7)
    limit = float(plans["memory_limit_gib"].iloc[0])
    if limit < 2 * plans["peak_reserved_gib"].max():
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.3g} GiB")
    axes.set(xlabel="peak memory of the fullest device [GiB]", ylabel="tokens/s, all devices")
    axes.set_title("Throughput against memory")
    legend_below(axes)
    return made


def undominated(plans: pd.DataFrame) -> pd.DataFrame:
    """The plans that are faster than every plan that takes no more memory, smallest first."""
    ranked = plans.sort_values(["peak_reserved_gib", "tokens_per_s"], ascending=[True, False])
    before = ranked["tokens_per_s"].cummax().shift(fill_value=0.0)
    return ranked[ranked["tokens_per_s"] > before]
