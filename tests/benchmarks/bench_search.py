"""Search time, capture apart, with the proven gap, on the zoo's GPT or on the cases given.

    PYTHONPATH=. python tests/benchmarks/bench_search.py [MODEL:CLUSTER:BATCH ...]

Capturing happens inside the search, once per micro-batch size; its CPU time is measured and printed apart.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.hardware.cluster import Cluster
from autopar.model.spec import load
from tests.benchmarks.timed_search import timed_search

ZOO = Path(__file__).parents[2] / "autopar/zoo"
CASES = [f"{ZOO / 'gpt.py'}:{cluster}:16" for cluster in ("local-cpu-2", "local-cpu-4", "local-cpu-8")]


def main(cases: list[str]) -> None:
    """Searches every case and prints what it took."""
    table = Table("model", "cluster", "batch", "capture s", "search s", "best", "step s", "gap", "done")
    for case in cases:
        model, name, batch = case.rsplit(":", 2)
        cluster = Cluster.load(name)
        precision = "bf16" if cluster.device.kind == "cuda" else "fp32"
        found, capturing, searching = timed_search(load(model), cluster, int(batch), precision)
        best = found.plans[0]
        table.add_row(
            Path(model).stem,
            name,
            batch,
            f"{capturing:.1f}",
            f"{searching:.1f}",
            best.mesh.describe(),
            f"{best.estimate['step_time_s']:.4f}",
            f"{100 * (best.optimality_gap or 0.0):.1f}%",
            "yes" if found.complete else "no",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main(sys.argv[1:] or CASES)
