"""Predicted against measured on this machine: many plans of the zoo's models with 2 real processes.

    PYTHONPATH=. python tests/benchmarks/bench_local.py [--steps 12] [--models gpt,mlp] [--output bench-local]

Measures the machine for each model (a profile as ``autopar profile`` writes it), makes a plan for every combination of
pins below, trains each for some steps in 2 gloo processes, and compares the median step time with the prediction.
Writes ``predictions.csv`` and ``predictions.png``; ends with the mean error and, per model, how far the plan that was
predicted fastest is from the one that was measured fastest. The machine should be idle otherwise.
"""

from __future__ import annotations

import argparse
import csv
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from autopar.cost.estimate import estimate
from autopar.errors import AutoparError
from autopar.hardware import Cluster
from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.plan import Plan
from autopar.planner.planner import search
from autopar.profiler import profile_model
from tests.processes import spawn

ZOO = Path(__file__).parents[2] / "autopar" / "zoo"
GLOBAL_BATCH = 16
WARM_UP = 3
PINS: list[dict[str, Any]] = [
    *({"dp_replicate": 2, "micro_batch": b, "recompute": r} for b in (1, 2, 8) for r in ("none", "full")),
    *({"dp_shard": 2, "micro_batch": b} for b in (2, 4, 8)),
    *({"tp": 2, "micro_batch": b} for b in (4, 16)),
    *({"pp": 2, "schedule": s, "micro_batch": b} for s in ("1f1b", "gpipe") for b in (2, 4)),
]


@dataclass(frozen=True)
class Row:
    """One plan of one model."""

    model: str
    plan: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def _train(paths: list[str], source: str, steps: int, output: str) -> None:
    """One process: trains every plan in turn; the first writes the median step times."""
    from autopar.runtime.parallelize import parallelize

    job = load(source)
    found = []
    for path in paths:
        plan = Plan.load(path)
        model, batch = parallelize(job, plan), job.example_batch(plan.global_batch)
        times = []
        for _ in range(steps + WARM_UP):
            dist.barrier()
            begun = time.perf_counter()
            model.step(batch)
            times.append(time.perf_counter() - begun)
        found.append(median(times[WARM_UP:]))
    if dist.get_rank() == 0:
        Path(output).write_text("\n".join(map(str, found)))


def _describe(pins: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in pins.items())


def bench(name: str, steps: int, folder: Path) -> list[Row]:
    """All rows of one model."""
    source = str(ZOO / f"{name}.py")
    job, plain = load(source), Cluster.load("local-cpu-2")
    sizes = sorted({pins["micro_batch"] for pins in PINS})
    print(f"{name}: measuring this machine", flush=True)
    profile = profile_model([capture(job, size) for size in sizes], plain, budget_s=60, model=source)
    profile.save(folder / f"{name}-profile.json")
    cluster = plain.with_profile(profile)
    plans: dict[str, Plan] = {}
    for pins in PINS:
        try:
            plans[_describe(pins)] = search(job, cluster, GLOBAL_BATCH, pins=pins, top=1).plans[0]
        except AutoparError as error:
            print(f"{name}: no plan for {_describe(pins)}: {error}")
    paths = []
    for index, plan in enumerate(plans.values()):
        path = folder / f"{name}-{index}.json"
        plan.save(path)
        paths.append(str(path))
    print(f"{name}: training {len(plans)} plans", flush=True)
    spawn(2, _train, paths, source, steps, str(folder / "times"))
    times = [float(line) for line in (folder / "times").read_text().split()]
    predicted = [estimate(job, plan, cluster).step_time_s for plan in plans.values()]
    rows = [Row(name, what, t, p) for what, t, p in zip(plans, times, predicted, strict=True)]
    for row in rows:
        print(
            f"  {row.plan:44} measured {row.measured_s * 1e3:8.1f} ms  predicted {row.predicted_s * 1e3:8.1f} ms "
            f"{row.error:+7.1%}",
            flush=True,
        )
    return rows


def regret(rows: list[Row]) -> float:
    """By how much the plan predicted fastest is slower than the one measured fastest."""
    chosen = min(rows, key=lambda row: row.predicted_s)
    return chosen.measured_s / min(row.measured_s for row in rows) - 1


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5))
    for name in dict.fromkeys(row.model for row in rows):
        mine = [row for row in rows if row.model == name]
        axes.scatter([r.measured_s * 1e3 for r in mine], [r.predicted_s * 1e3 for r in mine], label=name, s=18)
    ends = [min(r.measured_s for r in rows) * 800, max(r.measured_s for r in rows) * 1200]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--models", default=",".join(p.stem for p in sorted(ZOO.glob("*.py")) if p.stem != "__init__"))
    parser.add_argument("--output", type=Path, default=Path("bench-local"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    rows = [row for name in options.models.split(",") for row in bench(name, options.steps, options.output)]
    with (options.output / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["model", "plan", "measured_s", "predicted_s", "error"])
        writer.writerows([r.model, r.plan, r.measured_s, r.predicted_s, r.error] for r in rows)
    plot(rows, options.output / "predictions.png")
    print(f"\n{len(rows)} plans, mean absolute error {fmean(abs(row.error) for row in rows):.1%}")
    for name in dict.fromkeys(row.model for row in rows):
        print(f"{name}: predicted fastest is {regret([r for r in rows if r.model == name]):.1%} from measured fastest")


if __name__ == "__main__":
    main()
