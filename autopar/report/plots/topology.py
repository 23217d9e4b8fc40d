"""Topology: the levels of the network, their bandwidth, and which mesh axis crosses which."""

from __future__ import annotations

from matplotlib.figure import Figure

from autopar.report.explain import crosses
from autopar.report.plots.style import AXES, GREY, figure, legend_below
from autopar.report.subject import Subject
from autopar.units import GBPS


def topology(subject: Subject) -> Figure:
    """A row a link level, innermost lowest: a box for its domains, and a bar for each mesh axis that reaches it."""
    cluster, mesh = subject.cluster, subject.plan.mesh
    reached = crosses(subject)
    made, axes = figure(8.0, 1.6 + 1.1 * len(cluster.links))
    for level, link in enumerate(cluster.links):
        axes.barh(level, 1.0, 0.9, color=GREY, alpha=0.25)
        domains = max(1, cluster.devices // link.devices)
        text = f"{link.scope}: {domains} x {link.devices} devices\n{link.bandwidth / GBPS:,.0f} Gbit/s"
        axes.text(-0.02, level, text, ha="right", va="center", fontsize=9)
        crossing = [axis for axis, scope in reached.items() if scope == link.scope]
        for i, axis in enumerate(crossing):
            height = 0.8 / len(crossing)
            y = level - 0.4 + height * (i + 0.5)
            axes.barh(y, 0.96, height * 0.85, left=0.02, color=AXES[axis], label=axis)
            axes.text(0.5, y, f"{axis} = {getattr(mesh, axis)}", ha="center", va="center", fontsize=9)
    axes.set(xlim=(0, 1), xticks=[], yticks=[])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(f"{cluster.name}: {cluster.devices} x {cluster.device.name}; which axis crosses which link")
    legend_below(axes)
    return made
