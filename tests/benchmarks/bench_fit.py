"""Fits the efficiency surfaces on the published operator tables and prints how far off they are.

    PYTHONPATH=. python tests/benchmarks/bench_fit.py          errors of the profiles, and cross-validation
    PYTHONPATH=. python tests/benchmarks/bench_fit.py --refit  also the parameters that a fit on all rows finds

Errors are of the logarithm of the time (0.04 is 4%). "left out" is the error on shapes that a fit had not seen, over
five folds; duplicates of a shape are always in one fold. "by time" weights each row by its measured time, which is what
a step sees.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from autopar.cost.compute import ComputeModel
from autopar.hardware import Device
from autopar.hardware.matmul_table import AttentionRow, ProductRow

DEVICES = ("a100-pcie-80gb", "b200-sxm")
FOLDS = 5
Row = ProductRow | AttentionRow

# Parameter: (least, greatest). Those of a device file that a fit may move; 6 for products, 1 for grouped ones, 4 for
# attention.
PRODUCT = {
    "peak_fraction": (0.86, 0.92),
    "k_overhead": (0.0, 800.0),
    "tile_intensity": (2.0, 8.0),
    "wave_smoothing": (0.0, 1.0),
    "fixed_s": (0.0, 10e-6),
    "rate_cap": (0.4, 1.0),
}
GROUPED = {"grouped_fixed_s": (0.0, 15e-6)}
ATTENTION = {
    "forward_fraction": (0.3, 0.9),
    "backward_fraction": (0.2, 0.8),
    "half_length": (0.0, 600.0),
    "fixed_s": (0.0, 50e-6),
}


def predicted(device: Device, row: Row) -> float:
    """Seconds by the surface alone."""
    if isinstance(row, ProductRow):
        written = row.out_bytes * (2 if row.accumulate else 1)
        return ComputeModel(device).surface_time(row.shape, "bf16", written)
    peak = device.peak("bf16")
    return device.attention.time(row.shape, peak, device.compute_units, row.direction) + device.launch_overhead_s


def errors(device: Device, rows: Sequence[Row]) -> list[float]:
    return [math.log(predicted(device, row) / row.seconds) for row in rows]


def mean_error(device: Device, rows: Sequence[Row]) -> float:
    return fmean(abs(e) for e in errors(device, rows))


def moved(device: Device, values: dict[str, float], attention: bool) -> Device:
    if attention:
        return replace(device, attention=replace(device.attention, **values))
    return replace(device, matmul=replace(device.matmul, **values))


def fit(device: Device, rows: Sequence[Row], bounds: dict[str, tuple[float, float]], rounds: int = 160) -> Device:
    """The device with the parameters that make the mean error least; random steps that shrink, from where it is."""
    attention = bounds is ATTENTION
    chance = random.Random(0)
    surface = device.attention if attention else device.matmul
    best = {name: min(max(getattr(surface, name), low), high) for name, (low, high) in bounds.items()}
    least = mean_error(moved(device, best, attention), rows)
    for turn in range(rounds):
        width = 0.3 * 0.97**turn + 0.005
        trial = dict(best)
        for name in chance.sample(list(bounds), k=min(len(bounds), chance.randint(1, 2))):
            low, high = bounds[name]
            trial[name] = min(max(best[name] + chance.gauss(0, width) * (high - low), low), high)
        error = mean_error(moved(device, trial, attention), rows)
        if error < least:
            best, least = trial, error
    return moved(device, best, attention)


def folds(rows: Sequence[Row]) -> list[list[Row]]:
    shapes = sorted({str(row.shape) for row in rows})
    random.Random(1).shuffle(shapes)
    fold_of = {shape: index % FOLDS for index, shape in enumerate(shapes)}
    return [[row for row in rows if fold_of[str(row.shape)] == fold] for fold in range(FOLDS)]


def left_out_errors(device: Device, rows: Sequence[Row], bounds: dict[str, tuple[float, float]]) -> list[float]:
    parts = folds(rows)
    found: list[float] = []
    for held in parts:
        if held:
            fitted = fit(device, [row for part in parts if part is not held for row in part], bounds)
            found.extend(errors(fitted, held))
    return found


def report(device: Device, name: str, rows: Sequence[Row], bounds: dict[str, tuple[float, float]], refit: bool) -> None:
    now = errors(device, rows)
    absolute = sorted(abs(e) for e in now)
    by_time = sum(abs(math.exp(e) - 1) * row.seconds for e, row in zip(now, rows, strict=True)) / sum(
        row.seconds for row in rows
    )
    out = left_out_errors(device, rows, bounds)
    print(
        f"{device.name:16} {name:10} {len(rows):4} rows  mean {fmean(absolute):6.1%}  median "
        f"{absolute[len(rows) // 2]:6.1%}  p90 {absolute[int(len(rows) * 0.9)]:6.1%}  bias {fmean(now):+6.1%}  by time "
        f"{by_time:6.1%}  left out {fmean(abs(e) for e in out):6.1%}  {len(bounds)} parameters"
    )
    if refit:
        fitted = fit(device, rows, bounds, rounds=600)
        surface = fitted.attention if bounds is ATTENTION else fitted.matmul
        values = {key: round(getattr(surface, key), 9) for key in bounds}
        print(f"    refit: mean {mean_error(fitted, rows):.1%} with {values}")


def single_efficiency(rows: Sequence[Row]) -> float:
    """Mean error of one constant efficiency (the median), for comparison."""
    logs = [math.log(row.seconds / _flops(row)) for row in rows]
    middle = sorted(logs)[len(logs) // 2]
    return fmean(abs(x - middle) for x in logs)


def _flops(row: Row) -> float:
    if isinstance(row, ProductRow):
        return row.shape.flops
    return row.shape.forward_flops * (1.0 if row.direction == "forward" else 2.5)


def groups(device: Device) -> list[tuple[str, list[Row], dict[str, tuple[float, float]]]]:
    assert device.products is not None
    products = device.products.products
    found: list[tuple[str, list[Row], dict[str, tuple[float, float]]]] = [
        ("products", [r for r in products if not r.shape.grouped], PRODUCT),
        ("grouped", [r for r in products if r.shape.grouped], GROUPED),
        ("attention", list(device.products.attention), ATTENTION),
    ]
    return found


def main(make_device: Callable[[str], Device] = Device.load) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refit", action="store_true", help="print what a fit on all rows finds")
    refit = parser.parse_args().refit
    for name in DEVICES:
        device = make_device(name)
        for kind, rows, bounds in groups(device):
            report(device, kind, rows, bounds, refit)
            print(f"{'':16} {'':10} one efficiency for all: mean {single_efficiency(rows):.1%}")


if __name__ == "__main__":
    main()
