"""Frontier: throughput against memory of all plans, and those that no other beats in both."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from autopar.report.plots.style import BLUE, GREY, beside, figure, legend_below, thousands

LABEL = 0.06  # height of a label, as a part of the axis


def frontier(plans: pd.DataFrame) -> Figure:
    """Points of plans, the frontier as steps.

    Args:
        plans: columns ``mesh``, ``peak_reserved_gib``, ``tokens_per_s``, ``memory_limit_gib``; a row a plan.
    """
    made, axes = figure()
    axes.scatter(plans["peak_reserved_gib"], plans["tokens_per_s"], color=GREY, s=25, label="plans")
    best = undominated(plans)
    axes.step(best["peak_reserved_gib"], best["tokens_per_s"], where="post", color=BLUE, marker="o", label="frontier")
    for mesh, memory, speed in apart(best, plans["tokens_per_s"].max() - plans["tokens_per_s"].min()):
        beside(axes, mesh, memory, speed)
    limit = float(plans["memory_limit_gib"].iloc[0])
    if limit < 2 * plans["peak_reserved_gib"].max():
        axes.axvline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.3g} GiB")
    axes.yaxis.set_major_formatter(thousands)
    axes.margins(x=0.12)
    axes.set(xlabel="peak memory of the fullest device [GiB]", ylabel="tokens/s, all devices")
    axes.set_title("Throughput against memory")
    legend_below(axes)
    return made


def apart(best: pd.DataFrame, height: float) -> list[tuple[str, float, float]]:
    """Mesh, GiB and tokens/s of the points that get a label: from the fastest down, those far enough below the last.

    Args:
        height: tokens/s from the slowest to the fastest point drawn.
    """
    kept: list[tuple[str, float, float]] = []
    rows = zip(best["mesh"], best["peak_reserved_gib"], best["tokens_per_s"], strict=True)
    for mesh, memory, speed in sorted(rows, key=lambda row: -row[2]):
        if not kept or kept[-1][2] - speed >= LABEL * height:
            kept.append((str(mesh), memory, speed))
    return kept


def undominated(plans: pd.DataFrame) -> pd.DataFrame:
    """The plans that are faster than every plan that takes no more memory, smallest first."""
    ranked = plans.sort_values(["peak_reserved_gib", "tokens_per_s"], ascending=[True, False])
    before = ranked["tokens_per_s"].cummax().shift(fill_value=0.0)
    return ranked[ranked["tokens_per_s"] > before]
