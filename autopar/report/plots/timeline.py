"""Timeline: the pipeline as a Gantt chart, a row a rank; white is waiting."""

from __future__ import annotations

from matplotlib.figure import Figure

from autopar.report.plots.style import ACTIONS, GREY, VERMILION, figure, legend_below, seconds_unit
from autopar.report.subject import Subject

NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
DARK = "FW"  # bars on which black cannot be read
MOST_LABELS = 400  # more numbers than this cannot be read


def timeline(subject: Subject) -> Figure:
    """One bar an action, numbered by micro-batch; then what happens once a step (gradient sums, optimizer).

    The black strip at an action's foot is the part of it that is communication inside its stage.
    """
    estimate = subject.estimate
    unit, name = seconds_unit(estimate.step_time_s)
    ranks = len(estimate.timeline.queues)
    made, axes = figure(9.0, 1.6 + 0.5 * min(ranks, 16))
    axes.barh(range(ranks), [estimate.timeline.makespan_s * unit] * ranks, 0.8, color=GREY, alpha=0.25, label="waiting")
    events = list(estimate.timeline.events())
    communication = communication_shares(subject)
    numbered = len(events) <= MOST_LABELS
    for event in events:
        width = (event.end_s - event.start_s) * unit
        axes.barh(
            event.rank,
            width,
            0.8,
            left=event.start_s * unit,
            color=ACTIONS[event.action.kind],
            edgecolor="white",
            linewidth=0.4,
            label=NAMES[event.action.kind],
        )
        if numbered and width > 0.012 * estimate.step_time_s * unit:
            middle = (event.start_s + event.end_s) / 2 * unit
            colour = "white" if event.action.kind in DARK else "black"
            number = str(event.action.micro_batch)
            axes.text(middle, event.rank, number, color=colour, ha="center", va="center", fontsize=7)
        share = communication[event.action.stage]
        if share > 0.005:
            axes.barh(
                event.rank + 0.35, width * share, 0.1, left=event.start_s * unit, color="black", label="communication"
            )
    tail = estimate.step_time_s - estimate.timeline.makespan_s
    if tail > 0:
        left = [estimate.timeline.makespan_s * unit] * ranks
        axes.barh(
            range(ranks), [tail * unit] * ranks, 0.8, left=left, color=VERMILION, label="gradient sums, optimizer"
        )
    axes.set(xlabel=f"time in the step [{name}]", ylabel="pipeline rank", yticks=range(ranks))
    axes.set_xlim(0, estimate.step_time_s * unit)
    axes.invert_yaxis()
    axes.set_title(f"{subject.plan.schedule}, {subject.plan.micro_batches} micro-batches" if ranks > 1 else "One stage")
    legend_below(axes)
    return made


def communication_shares(subject: Subject) -> list[float]:
    """For each stage of the chain, the part of a micro-batch's time that is not computing."""
    graph, plan = subject.graph, subject.plan
    blocks = {block.name: block for block in graph.blocks}
    shares = []
    for chosen, time in zip(plan.stage_blocks(), subject.estimate.stage_times, strict=True):
        wire = 0.0
        for one in chosen:
            cost = subject.engine.block_cost(graph, blocks[one.name], plan.layouts[one.layout], plan.mesh)
            wire += sum(cost.communication_s.values())
            wire += sum(cost.replay_communication_s.values()) if one.recompute == "full" else 0.0
        shares.append(wire / (time.forward_s + time.backward_s))
    return shares
