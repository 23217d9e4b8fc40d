"""Block graph: the operators of one block, how each is placed, and the redistributions on its edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar.errors import InputError
from autopar.report.plots.style import BLUE, GREY, ORANGE, SKY, VERMILION, figure, legend_below
from autopar.report.subject import Subject
from autopar.sharding.resolve import OUTPUT, ResolvedBlock, resolve

if TYPE_CHECKING:
    Graph = nx.DiGraph[str]
else:
    Graph = nx.DiGraph  # takes no type argument when it runs


def block_graph(subject: Subject, kind: str | None = None) -> Figure:
    """Operators from top to bottom, coloured where sharded; edges with a redistribution are drawn and named.

    Args:
        kind: of the block; unset, the kind with the most blocks.

    Raises:
        InputError: no block is of this kind.
    """
    resolved = _resolved(subject, kind)
    drawn = edges_of(resolved)
    rows = _rows(drawn)
    widest = max(len([n for n in rows if rows[n][1] == level]) for level in {y for _, y in rows.values()})
    depth = 1 + max(y for _, y in rows.values())
    made, axes = figure(max(6.0, 2.6 * widest), 1.5 + 0.62 * depth)
    for source, target, data in drawn.edges(data=True):
        _arrow(axes, rows[source], rows[target], data["steps"])
    labels = dict(zip(resolved.block.nodes, resolved.block.labels, strict=True))
    for colour, name in ((ORANGE, "sharded"), (BLUE, "replicated"), (SKY, "input or output")):
        axes.scatter([], [], color=colour, label=name)
    for node, (x, y) in rows.items():
        placed = _placed(resolved, node) if node in labels else ""
        colour = SKY if node not in labels else ORANGE if "S(" in placed or "P" in placed else BLUE
        text = f"{labels.get(node, node)}\n{placed}".strip()
        box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": colour, "linewidth": 1.5}
        axes.text(x, y, text, fontsize=6.5, ha="center", va="center", bbox=box)
    xs = [x for x, _ in rows.values()]
    axes.set(xlim=(min(xs) - 0.7, max(xs) + 0.7), ylim=(depth - 0.3, -0.7), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(f"Block {resolved.block.name!r}, {subject.plan.mesh.describe()}: placements and redistributions")
    legend_below(axes)
    return made


def edges_of(resolved: ResolvedBlock) -> Graph:
    """Inputs, operators and outputs of a block; an edge's ``steps`` name its redistributions, as ``tp: R -> S(1)``."""
    graph: Graph = nx.DiGraph()
    own = set(resolved.block.nodes)
    graph.add_nodes_from(resolved.block.nodes)
    for edge in resolved.edges:
        if edge.producer not in own and edge.producer not in resolved.block.inputs:
            continue  # parameters and buffers
        words = [f"{step.axis}: {step.conversion.src} -> {step.conversion.dst}" for step in edge.steps]
        for name, number in edge.consumers:
            target = f"output {resolved.block.outputs[number]}" if name == OUTPUT else name
            graph.add_edge(edge.producer, target, steps=words)
    return graph


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], steps: Sequence[str]) -> None:
    """One edge, bent where it passes other layers, with the redistributions on it."""
    bend = 0.35 if end[1] - start[1] > 1 else 0.0
    style: dict[str, Any] = {"arrowstyle": "->", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 8, "shrinkB": 10}
    style |= {"color": VERMILION, "linewidth": 1.6} if steps else {"color": GREY, "linewidth": 0.8}
    axes.annotate("", end, start, arrowprops=style)
    if steps:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        if bend:
            y = float(int(y))  # level with a row of operators: labels of straight arrows are between rows
        # a quadratic curve's middle lies half as far out as its control point
        side = -0.3 * bend * (end[1] - start[1]) / 2
        place, text = ("right", x + side - 0.02) if bend else ("left", x + 0.02)  # beside the arrow, not on it
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        axes.text(text, y, "; ".join(steps), fontsize=6.5, color=VERMILION, ha=place, va="center", bbox=box)


def _resolved(subject: Subject, kind: str | None) -> ResolvedBlock:
    kinds = subject.graph.block_kinds()
    chosen = kind or max(kinds, key=lambda name: len(kinds[name]))
    if chosen not in kinds:
        raise InputError(f"block kind {chosen!r} is unknown", f"The model has {', '.join(kinds)}")
    block = kinds[chosen][0]
    layout = next(b.layout for b in subject.plan.blocks if b.name == block.name)
    return resolve(subject.graph, block, subject.plan.layouts[layout], subject.plan.mesh)


def _placed(resolved: ResolvedBlock, node: str) -> str:
    pairs = [f"{axis} {placement}" for axis, placement in resolved.placement_of(node).items() if str(placement) != "R"]
    return ", ".join(pairs)


def _rows(graph: Graph) -> dict[str, tuple[float, float]]:
    """Where each node goes: its layer from the top, spread evenly in it."""
    found: dict[str, tuple[float, float]] = {}
    for level, nodes in enumerate(nx.topological_generations(graph)):
        count = len(nodes)
        for i, node in enumerate(sorted(nodes)):
            found[node] = (i - (count - 1) / 2, float(level))
    return found
