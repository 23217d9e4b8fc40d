"""Tables of a comparison for the terminal."""

from __future__ import annotations

from rich.table import Table

from autopar.validate.validate import Report


def rows_table(report: Report) -> Table:
    """One line a run."""
    table = Table(title="Predicted against measured")
    table.add_column("run", overflow="fold")
    for name in ("measured s", "predicted s", "error %", "peak GiB", "predicted GiB"):
        table.add_column(name, justify="right")
    for one in report.outcomes:
        error, row = one.step_error, one.row
        if one.error:
            table.add_row(one.row_id, _number(one.measured_s), "failed", "", "", one.error)
            continue
        table.add_row(
            one.row_id,
            _number(one.measured_s),
            _number(one.predicted_s),
            "" if error is None else f"{100 * error:+.1f}",
            _number(row.peak_allocated_gib if row else None),
            _number(one.allocated_gib),
        )
    return table


def summary_table(report: Report, by: str) -> Table:
    """One line a group."""
    table = Table(title="Mean absolute error of the step time")
    table.add_column(by)
    columns = {
        "runs": "n",
        "failed": "failed",
        "mean %": "mean_abs_error_pct",
        "median %": "median_abs_error_pct",
        "worst %": "worst_error_pct",
        "rank": "rank_correlation",
        "memory %": "memory_mean_abs_error_pct",
        "peak-rate roofline %": "roofline_mean_abs_error_pct",
        "one efficiency %": "single_efficiency_mean_abs_error_pct",
    }
    for name in columns:
        table.add_column(name, justify="right")
    for group, values in report.summary().items():
        table.add_row(group, *(_number(values[key]) for key in columns.values()))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
