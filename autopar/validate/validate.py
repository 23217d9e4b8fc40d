"""Predicted against measured, row by row, then by group; with two plain models beside it to show what is gained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autopar.errors import AutoparError, InputError
from autopar.units import GIB
from autopar.validate.baselines import model_flops_s, roofline_s
from autopar.validate.predict import Predictor
from autopar.validate.rows import Row, read_rows


@dataclass(frozen=True)
class Outcome:
    """One row with its prediction, or the reason why there is none.

    Attributes:
        group: value of the column that rows are grouped by.
        roofline_s: the longest of arithmetic at peak, memory traffic and traffic on the wire, perfectly overlapped.
        ideal_s: arithmetic at the peak rate alone.
    """

    row_id: str
    group: str
    row: Row | None = None
    predicted_s: float | None = None
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    roofline_s: float | None = None
    ideal_s: float | None = None
    error: str | None = None

    @property
    def measured_s(self) -> float | None:
        return self.row.measured_s if self.row else None

    @property
    def step_error(self) -> float | None:
        """Relative error of the step time; positive where the prediction is too slow."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s - 1

    def to_json(self) -> dict[str, Any]:
        """The documented keys of a row."""
        row, error = self.row, self.step_error
        found: dict[str, Any] = {
            "id": self.row_id,
            "group": self.group,
            "measured_step_time_s": self.measured_s,
            "predicted_step_time_s": self.predicted_s,
            "step_time_error_pct": None if error is None else 100 * error,
            "measured_peak_allocated_gib": row.peak_allocated_gib if row else None,
            "measured_peak_reserved_gib": row.peak_reserved_gib if row else None,
            "predicted_peak_allocated_gib": self.allocated_gib,
            "predicted_peak_reserved_gib": self.reserved_gib,
        }
        return {**found, "error": self.error} if self.error else found


@dataclass(frozen=True)
class Report:
    """All rows and their summary."""

    outcomes: tuple[Outcome, ...]

    def groups(self) -> dict[str, list[Outcome]]:
        """Outcomes by group, in order of first appearance."""
        found: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.group, []).append(outcome)
        return found

    def summary(self) -> dict[str, dict[str, Any]]:
        """Errors per group and over all rows."""
        parts = {name: _summary(group) for name, group in self.groups().items()}
        return {**parts, "all": _summary(self.outcomes)}

    def to_json(self) -> dict[str, Any]:
        """The documented keys of ``validate --json``."""
        return {"rows": [o.to_json() for o in self.outcomes], "summary": self.summary()}


def validate(path: str | Path, by: str = "group", progress: Callable[[int, int, str], None] | None = None) -> Report:
    """Predicts every run of a table.

    Args:
        path: CSV of runs.
        by: column to group by; ``group`` is the part of the id before the first dash.
        progress: called with (rows done, rows, id) before each row.

    Raises:
        InputError: the table cannot be read, or lacks the column.
    """
    rows, faults = read_rows(path)
    if by != "group" and by not in Row.model_fields:
        raise InputError(f"column {by!r} is not one of the table", f"Columns: {', '.join(Row.model_fields)}")
    predictor = Predictor()
    outcomes = [Outcome(name, name.split("-", 1)[0], error=fault) for name, fault in faults]
    for number, row in enumerate(rows):
        if progress:
            progress(number, len(rows), row.id)
        outcomes.append(_outcome(predictor, row, str(getattr(row, by))))
    return Report(tuple(outcomes))


def _outcome(predictor: Predictor, row: Row, group: str) -> Outcome:
    try:
        found = predictor.predict(row)
    except AutoparError as error:
        return Outcome(row.id, group, row, error=str(error))
    return Outcome(
        row.id,
        group,
        row,
        predicted_s=found.step_time_s,
        allocated_gib=found.peak_allocated / GIB,
        reserved_gib=found.peak_reserved / GIB,
        roofline_s=roofline_s(row, found.estimate),
        ideal_s=model_flops_s(row, found.estimate),
    )


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors of a group of rows, in percent."""
    compared = [o for o in outcomes if o.step_error is not None]
    errors = [o.step_error or 0.0 for o in compared]
    memory = [
        o.allocated_gib / o.row.peak_allocated_gib - 1
        for o in outcomes
        if o.row and o.row.peak_allocated_gib and o.allocated_gib is not None
    ]
    plain = {
        "roofline": [o.roofline_s / o.measured_s - 1 for o in compared if o.roofline_s and o.measured_s],
        "single_efficiency": _one_efficiency(compared),
    }
    return {
        "n": len(outcomes),
        "failed": sum(o.error is not None for o in outcomes),
        "mean_abs_error_pct": _mean_pct(errors),
        "median_abs_error_pct": 100 * median(map(abs, errors)) if errors else None,
        "worst_error_pct": 100 * max(errors, key=abs) if errors else None,
        "worst_id": max(compared, key=lambda o: abs(o.step_error or 0.0)).row_id if compared else None,
        "bias_pct": 100 * fmean(errors) if errors else None,
        "rank_correlation": rank_correlation(
            [o.predicted_s or 0.0 for o in compared], [o.measured_s or 0.0 for o in compared]
        ),
        "memory_mean_abs_error_pct": _mean_pct(memory),
        "memory_worst_error_pct": 100 * max(memory, key=abs) if memory else None,
        **{f"{name}_mean_abs_error_pct": _mean_pct(values) for name, values in plain.items()},
    }


def _mean_pct(errors: Sequence[float]) -> float | None:
    return 100 * fmean(map(abs, errors)) if errors else None


def _one_efficiency(outcomes: Sequence[Outcome]) -> list[float]:
    """Errors of arithmetic at one efficiency, the one that suits the group best (the median)."""
    ratios = [o.measured_s / o.ideal_s for o in outcomes if o.measured_s and o.ideal_s]
    return [median(ratios) / ratio - 1 for ratio in ratios]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's: Pearson's of the ranks, ties at their mean rank; None for fewer than two or constant values."""
    if len(a) < 2:
        return None
    x, y = _ranks(a), _ranks(b)
    mx, my = fmean(x), fmean(y)
    square = sum((v - mx) ** 2 for v in x) * sum((v - my) ** 2 for v in y)
    if square == 0:
        return None
    return float(sum((u - mx) * (v - my) for u, v in zip(x, y, strict=True)) / square**0.5)


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) - 1) / 2 for v in values]
