"""The table and the plot of bench_local.py."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from autopar.hardware import Profile
from autopar.plan import write_text
from tests.benchmarks.local_worker import Measured


@dataclass(frozen=True)
class Row:
    """One plan of one model in one network."""

    model: str
    network: str
    measured: Measured
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured.step_s - 1


def regret(rows: Sequence[Row]) -> float:
    """By how much the plan predicted fastest is slower than the one measured fastest."""
    chosen = min(rows, key=lambda row: row.predicted_s)
    return chosen.measured.step_s / min(row.measured.step_s for row in rows) - 1


def _groups(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.network, row.model), []).append(row)
    return found


def summary(rows: Sequence[Row], profile: Profile) -> str:
    """A Markdown table, one line a model and network."""
    mark = profile.fingerprint
    lines = [
        f"{profile.date}, {mark.processor}, {mark.cores} cores, torch {mark.torch}: {len(rows)} plans, mean absolute "
        f"error {fmean(abs(r.error) for r in rows):.1%}, median {median(abs(r.error) for r in rows):.1%}; other "
        f"programs took {fmean(r.measured.others for r in rows):.0%} of the processors in the mean.",
        "",
        "| network | model | plans | mean error | bias | worst | predicted fastest is slower than the fastest by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (network, model), part in _groups(rows).items():
        worst = max(part, key=lambda row: abs(row.error))
        lines.append(
            f"| {network} | {model} | {len(part)} | {fmean(abs(r.error) for r in part):.1%} "
            f"| {fmean(r.error for r in part):+.1%} | {worst.measured.plan} {worst.error:+.1%} | {regret(part):.1%} |"
        )
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Predicted against measured step time, one colour a model, one mark a network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    models, networks = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("model", "network"))
    for (network, model), part in _groups(rows).items():
        axes.scatter(
            [row.measured.step_s * 1e3 for row in part],
            [row.predicted_s * 1e3 for row in part],
            label=f"{model}, {network}",
            s=18,
            color=f"C{models.index(model)}",
            marker="os^"[networks.index(network)],
        )
    ends = [min(r.measured.step_s for r in rows) * 800, max(r.measured.step_s for r in rows) * 1200]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axes.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def write_report(rows: Sequence[Row], folder: Path, profile: Profile) -> str:
    """Writes table, summary and plot; gives the text for the terminal."""
    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["network", "model", "plan", "measured_s", "predicted_s", "error", "spread", "others"])
        for r in rows:
            one = r.measured
            numbers = (one.step_s, r.predicted_s, r.error, one.spread, one.others)
            writer.writerow([r.network, r.model, one.plan, *(f"{x:.5g}" for x in numbers)])
    plot(rows, folder / "predictions.png")
    write_text(folder / "summary.md", summary(rows, profile))
    details = [
        f"{r.network:9} {r.model:4} {r.measured.plan:44} measured {r.measured.step_s * 1e3:8.1f} ms  predicted "
        f"{r.predicted_s * 1e3:8.1f} ms  {r.error:+7.1%}  (others {r.measured.others:4.0%})"
        for r in rows
    ]
    return "\n".join([*details, "", summary(rows, profile)])
