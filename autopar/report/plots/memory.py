"""Memory of one device of each pipeline rank: by component against the limit, and over the step."""

from __future__ import annotations

from itertools import accumulate

from matplotlib.figure import Figure

from autopar.cost.estimate import stage_parts
from autopar.cost.memory import saved_per_micro_batch
from autopar.report.explain import memory_parts
from autopar.report.plots.style import AXES, BLUE, GREEN, MEMORY, VERMILION, figure, legend_below, seconds_unit
from autopar.report.subject import Subject
from autopar.units import GIB

MOST_LINES = 8  # more cannot be told apart
LINES = (BLUE, VERMILION, GREEN, *AXES.values())


def memory(subject: Subject) -> Figure:
    """A stacked bar a rank, up to the reserved peak, and the limit as a line."""
    ranks = len(subject.estimate.stages)
    made, axes = figure(min(14.0, max(5.0, 2.5 + 0.5 * ranks)), 4.0)
    parts = [memory_parts(subject, rank) for rank in range(ranks)]
    below = [0.0] * ranks
    for name, colour in MEMORY.items():
        heights = [part[name] / GIB for part in parts]
        if any(heights):
            axes.bar(range(ranks), heights, 0.7, bottom=below, color=colour, label=name)
            below = [low + high for low, high in zip(below, heights, strict=True)]
    limit, highest = subject.estimate.memory_limit / GIB, max(below)
    if limit < 4 * highest:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1, label=f"limit, {limit:.3g} GiB")
    else:  # the bars would be too low to read
        axes.set_ylim(0, 1.25 * highest)
        axes.text(0.5, 0.97, f"limit {limit:.3g} GiB, far above", transform=axes.transAxes, ha="center", va="top")
    axes.set(xlabel="pipeline rank", ylabel="memory of one device [GiB]", xticks=range(ranks))
    axes.set_title("Peak memory by component")
    legend_below(axes)
    return made


def memory_over_time(subject: Subject) -> Figure:
    """Allocated bytes of each rank (of many, some evenly chosen) through the step: what is always
    held, and the activations of micro-batches."""
    unit, name = seconds_unit(subject.estimate.step_time_s)
    made, axes = figure()
    ranks = len(subject.estimate.stages)
    shown = sorted({round(i * (ranks - 1) / (MOST_LINES - 1)) for i in range(MOST_LINES)})
    for rank in shown:
        times, held = held_over_time(subject, rank)
        colour = LINES[rank % len(LINES)]
        axes.step([t * unit for t in times], [b / GIB for b in held], where="post", color=colour, label=f"rank {rank}")
    axes.set(xlabel=f"time in the step [{name}]", ylabel="allocated by one device [GiB]")
    axes.set_ylim(bottom=0)
    axes.set_title(
        "Memory over the step" if len(shown) == ranks else f"Memory over the step, {len(shown)} of {ranks} ranks"
    )
    legend_below(axes)
    return made


def held_over_time(subject: Subject, rank: int) -> tuple[list[float], list[int]]:
    """Seconds, and the bytes allocated from then on; a forward holds its activations from its start, a backward (where
    split, its gradients of weights) lets go at its end. The most is the rank's ``allocated`` peak."""
    estimate = subject.estimate
    parts = stage_parts(subject.engine, subject.plan)
    saved = {stage: saved_per_micro_batch(parts[stage]) for stage in estimate.held[rank]}
    changes: list[tuple[float, int]] = []
    for event in estimate.timeline.events():
        if event.rank == rank and event.action.kind != "I":
            forward = event.action.kind == "F"
            size = saved[event.action.stage]
            changes.append((event.start_s, size) if forward else (event.end_s, -size))
    changes.sort()  # what ends now is let go before what starts now
    always = estimate.stages[rank].allocated - estimate.stages[rank].activations
    times = [0.0, *(time for time, _ in changes), estimate.step_time_s]
    held = list(accumulate((size for _, size in changes), initial=always))
    return times, [*held, held[-1]]
