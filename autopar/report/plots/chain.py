"""Chain: a captured model as its blocks from top to bottom, with the tensors that pass between them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autopar.model.graph import Block, OpGraph
from autopar.model.summary import saved_bytes
from autopar.report.plots.style import BLUE, GREY, ORANGE, figure
from autopar.units import format_bytes, format_count

WIDTH_INCHES, ROW_INCHES = 8.0, 1.05
LEFT, UNITS = -1.0, 2.4  # of the x axis
EDGE = 0.4  # where skip connections leave a box
BEND = 0.3  # of skip connections, as a part of their length


@dataclass(frozen=True)
class Group:
    """Blocks of one kind, one after the other."""

    blocks: tuple[Block, ...]

    @property
    def title(self) -> str:
        """``blocks.0 .. blocks.11 (12 x blocks)``."""
        first, last = self.blocks[0], self.blocks[-1]
        many = f"{first.name} .. {last.name}  ({len(self.blocks)} x)" if len(self.blocks) > 1 else first.name
        return many if len(self.blocks) > 1 or first.kind == first.name else f"{first.name}  ({first.kind})"


def groups_of(graph: OpGraph) -> list[Group]:
    """The chain of blocks, equal neighbours together."""
    return [Group(tuple(blocks)) for _, blocks in groupby(graph.blocks, key=lambda block: block.kind)]


def passes(graph: OpGraph, groups: list[Group]) -> list[tuple[int, int, str]]:
    """Activations between groups: (from, to, what); a block after the next is reached by a skip connection."""
    home = {name: i for i, group in enumerate(groups) for block in group.blocks for name in block.nodes}
    found: dict[tuple[int, int], dict[str, str]] = {}
    for i, group in enumerate(groups):
        for block in group.blocks:
            for name in block.inputs:
                if name in home and home[name] != i:
                    meta = graph.nodes[name].meta
                    text = f"{list(meta.shape)} {str(meta.dtype).removeprefix('torch.')}, {format_bytes(meta.nbytes)}"
                    found.setdefault((home[name], i), {})[name] = text
    return [(start, end, "\n".join(texts.values())) for (start, end), texts in found.items()]


def chain(graph: OpGraph) -> Figure:
    """The blocks with parameters, forward FLOPs and saved bytes of all in a group; skip connections bend aside."""
    groups = groups_of(graph)
    made, axes = figure(WIDTH_INCHES, 1.2 + ROW_INCHES * len(groups))
    for start, end, text in passes(graph, groups):
        _arrow(axes, start, end, text)
    for i, group in enumerate(groups):
        box: dict[str, Any] = {"boxstyle": "round,pad=0.4", "facecolor": "white", "linewidth": 1.5}
        box["edgecolor"] = ORANGE if len(group.blocks) > 1 else BLUE
        axes.text(
            0, i, f"{group.title}\n{_facts(graph, group)}", fontsize=7.5, ha="center", va="center", bbox=box, zorder=3
        )
    axes.set(xlim=(LEFT, LEFT + UNITS), ylim=(len(groups) - 0.4, -0.6), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(f"Blocks of the model, micro-batch {graph.batch_size}")
    return made


def _facts(graph: OpGraph, group: Group) -> str:
    parameters = {p for block in group.blocks for p in block.parameters if graph.nodes[p].kind == "parameter"}
    flops = sum(graph.nodes[name].forward_flops for block in group.blocks for name in block.nodes)
    count = format_count(sum(graph.nodes[p].meta.numel for p in parameters))
    saved = format_bytes(saved_bytes(graph, group.blocks))
    return f"{count} parameters, {format_count(flops)} FLOPs forward, {saved} saved"


def _arrow(axes: Axes, start: int, end: int, text: str) -> None:
    skips = end - start > 1
    side = EDGE if skips else 0.0
    style: dict[str, Any] = {"arrowstyle": "->", "color": GREY, "shrinkA": 14, "shrinkB": 14, "zorder": 1}
    style["connectionstyle"] = f"arc3,rad={-BEND}" if skips else "arc3"
    axes.annotate("", (side, end), (side, start), arrowprops=style)
    # a quadratic curve's middle lies half as far out as its control point
    out = BEND * (end - start) * ROW_INCHES / 2 * UNITS / WIDTH_INCHES if skips else 0.0
    x = side + out + 0.03
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.text(x, (start + end) / 2, text, fontsize=6, color="#555555", ha="left", va="center", bbox=box)
