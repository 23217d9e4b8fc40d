"""Errors of the published runs, and of each group when the fitted constant had not seen it.

    PYTHONPATH=. python tests/benchmarks/bench_validate.py

One constant of this table is fitted over all groups at once: how much of overlapped communication's time the compute
beside it loses (``autopar.validate.trainers.INTERFERENCE``). "Left out" is a group's error with the value that is best
for the mean of the other groups' errors. Constants of the device files are fitted by bench_fit.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from autopar.errors import AutoparError
from autopar.hardware.locations import data_file
from autopar.validate.predict import Predictor
from autopar.validate.rows import read_rows

GRID = (0.0, 0.2, 0.3, 0.4, 0.5, 0.7)


def errors_at(value: float) -> dict[str, float]:
    """Mean absolute error of the step time by group (and device, where a group has several), in percent."""
    rows, _ = read_rows(data_file("measured/training_runs.csv"))
    predictor, found = Predictor(value), {}  # type: Predictor, dict[str, list[float]]
    for row in rows:
        try:
            time = predictor.predict(row).step_time_s
        except AutoparError as error:
            print(f"{row.id}: {error}")
            continue
        name = f"{row.group} {row.gpu}" if row.group == "mpt" else row.group
        found.setdefault(name, []).append(100 * abs(time / (row.measured_s or time) - 1))
    return {name: fmean(values) for name, values in found.items()}


def best(table: Mapping[float, Mapping[str, float]], without: str) -> float:
    """The value with the least mean error over all groups but one."""
    return min(table, key=lambda v: fmean(e for name, e in table[v].items() if name != without))


def main() -> None:
    table = {value: errors_at(value) for value in GRID}
    print("group" + " " * 20 + "".join(f"{v:>8}" for v in GRID) + "   left out (value)")
    for name in table[GRID[0]]:
        chosen = best(table, name)
        line = "".join(f"{table[v][name]:8.2f}" for v in GRID)
        print(f"{name:25}{line}   {table[chosen][name]:.2f} ({chosen})")


if __name__ == "__main__":
    main()
