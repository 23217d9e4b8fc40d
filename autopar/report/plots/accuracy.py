"""Accuracy: predicted against measured step time, a point a run, a colour a group."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from autopar.report.plots.style import AXES, BLUE, GREY, figure, legend_below

COLOURS = (BLUE, *AXES.values(), "black")
MARKERS = "osD^v<>"


def accuracy(rows: pd.DataFrame) -> Figure:
    """Both in seconds, on logarithmic axes; the line is a perfect prediction, the band 10% about it.

    Args:
        rows: columns ``group``, ``measured_step_time_s``, ``predicted_step_time_s``; incomplete rows are left out.
    """
    known = rows.dropna(subset=["measured_step_time_s", "predicted_step_time_s"])
    made, axes = figure(5.5, 5.5)
    low = known[["measured_step_time_s", "predicted_step_time_s"]].min().min() / 1.3
    high = known[["measured_step_time_s", "predicted_step_time_s"]].max().max() * 1.3
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="equal")
    axes.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color=GREY, alpha=0.4, label="10%")
    for i, (name, group) in enumerate(known.groupby("group")):
        axes.scatter(
            group["measured_step_time_s"],
            group["predicted_step_time_s"],
            s=18,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            label=f"{name} ({len(group)})",
        )
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="measured step time [s]", ylabel="predicted step time [s]")
    axes.set_title("Predicted against measured")
    legend_below(axes)
    return made
