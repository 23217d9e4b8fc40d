"""Breakdown: the step time by component, one bar a plan."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from autopar.report.plots.style import TIME, figure, legend_below, seconds_unit
from autopar.report.subject import Subject
from autopar.report.tables import COMPONENTS


def breakdown(subjects: Sequence[Subject]) -> Figure:
    """A stacked bar a plan; its length is the step time."""
    unit, name = seconds_unit(max(s.estimate.step_time_s for s in subjects))
    made, axes = figure(8.0, 1.8 + 0.45 * len(subjects))
    left = [0.0] * len(subjects)
    for part, colour in TIME.items():
        widths = [subject.estimate.breakdown[part] * unit for subject in subjects]
        if any(widths):
            axes.barh(range(len(subjects)), widths, 0.6, left=left, color=colour, label=COMPONENTS[part])
            left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set(xlabel=f"step time [{name}]", yticks=range(len(subjects)))
    axes.set_yticklabels([subject.name for subject in subjects])
    axes.invert_yaxis()
    axes.set_title("Where the step goes")
    legend_below(axes)
    return made
