"""Search time, capture apart, with the proven gap, on the zoo's GPT or on the cases given.

    python tests/benchmarks/bench_search.py [MODEL:CLUSTER:BATCH ...]

Capturing happens inside the search, once per micro-batch size; its CPU time is measured and printed apart.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.planner import planner
from autopar.planner.planner import SearchResult, search

ZOO = Path(__file__).parents[2] / "autopar/zoo"
CASES = [f"{ZOO / 'gpt.py'}:{cluster}:16" for cluster in ("local-cpu-2", "local-cpu-4", "local-cpu-8")]


def timed(job: TrainingJob, cluster: Cluster, batch: int, precision: str) -> tuple[SearchResult, float, float]:
    """The result, and the CPU seconds of capturing and of all else; CPU time, so that a busy machine counts less."""
    capturing = 0.0

    def counted(captured: TrainingJob, size: int, device: str = "cpu") -> OpGraph:
        nonlocal capturing
        started = time.process_time()
        graph = capture(captured, size, device)
        capturing += time.process_time() - started
        return graph

    original, planner.capture = planner.capture, counted
    started = time.process_time()
    try:
        found = search(job, cluster, batch, precision)
    finally:
        planner.capture = original
    return found, capturing, time.process_time() - started - capturing


def main(cases: list[str]) -> None:
    """Searches every case and prints what it took."""
    table = Table("model", "cluster", "batch", "capture s", "search s", "best", "step s", "gap", "done")
    for case in cases:
        model, name, batch = case.rsplit(":", 2)
        cluster = Cluster.load(name)
        precision = "bf16" if cluster.device.kind == "cuda" else "fp32"
        found, capturing, searching = timed(load(model), cluster, int(batch), precision)
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
