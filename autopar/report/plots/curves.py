"""Curves over device counts, batch sizes or sequence lengths."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from autopar.report.plots.style import BLUE, GREY, ORANGE, beside, figure, legend_below, thousands


def scaling(table: pd.DataFrame) -> Figure:
    """Throughput over device counts: strong (one global batch) and weak (one batch a device), and linear.

    Args:
        table: columns ``kind`` (``strong`` or ``weak``), ``devices``, ``tokens_per_s``.
    """
    made, axes = figure()
    for kind, colour, marker in (("strong", BLUE, "o"), ("weak", ORANGE, "s")):
        rows = table[table["kind"] == kind].sort_values("devices")
        if len(rows):
            axes.plot(rows["devices"], rows["tokens_per_s"], color=colour, marker=marker, label=f"{kind} scaling")
            first = rows.iloc[0]
            ideal = first["tokens_per_s"] / first["devices"] * rows["devices"]
            axes.plot(rows["devices"], ideal, color=GREY, linestyle="--", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    counts = sorted(set(table["devices"]))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter(thousands)
    axes.set(xlabel="devices", ylabel="tokens/s, all devices")
    axes.set_title("Scaling of the best plan")
    legend_below(axes)
    return made


def sweep(table: pd.DataFrame, over: str, value: str = "tokens_per_s") -> Figure:
    """One quantity over another; each point names the mesh of the best plan there, where it changes.

    Args:
        table: columns ``over``, ``value``, ``mesh``.
        over: column for the x axis, such as ``global_batch`` or ``sequence_length``; its name is the label.
    """
    made, axes = figure()
    rows = table.sort_values(over)
    axes.plot(rows[over], rows[value], color=BLUE, marker="o")
    falls = rows[value].shift(-1) < rows[value]  # the label keeps to the side where the curve does not go on
    changes = rows["mesh"] != rows["mesh"].shift()
    for x, y, mesh, above in zip(
        rows[over][changes], rows[value][changes], rows["mesh"][changes], falls[changes], strict=True
    ):
        beside(axes, str(mesh), x, y, above)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(rows[over]), [f"{x:g}" for x in rows[over]])
    axes.set(xlabel=_words(over), ylabel=_words(value))
    axes.set_ylim(0, 1.1 * rows[value].max())
    axes.margins(x=0.12)
    if rows[value].max() >= 1000:
        axes.yaxis.set_major_formatter(thousands)
    axes.set_title(f"Best plan over {_words(over)}")
    return made


def _words(column: str) -> str:
    units = {"tokens_per_s": "tokens/s, all devices", "step_time_s": "step time [s]", "global_batch": "samples a step"}
    units["sequence_length"] = "sequence length [tokens]"
    units["bandwidth_gbps"] = "bandwidth [Gbit/s]"
    units["memory_gib"] = "memory of a device [GiB]"
    return units.get(column, column.replace("_", " "))
