"""The demo: the whole way from a model to a trained one on this machine, in a few minutes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from autopar.hardware.cluster import Cluster
from autopar.hardware.profiles import Profile
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.model.summary import summarize
from autopar.plan import Plan
from autopar.planner.planner import SearchResult, search
from autopar.profiler import profile_model, usable
from autopar.report.progress import progress_bar
from autopar.report.tables import graph_table, plan_table, why_it_wins
from autopar.runtime.launch import run
from autopar.runtime.trainer import Options
from autopar.units import format_seconds

CLUSTER, GLOBAL_BATCH, MICRO_BATCHES = "local-cpu-2", 16, (1, 2, 4, 8, 16)
PACKAGE = Path(__file__).parent


def demo(folder: Path, steps: int, budget_s: float, console: Console) -> dict[str, Any]:
    """Captures the zoo GPT, measures this machine, searches, trains with the winner.

    Args:
        folder: gets ``plan.json`` and the measured profile.
        steps: optimizer steps to train.
        budget_s: seconds to spend on measuring operators.
        console: where everything is shown.

    Returns:
        The run's summary.
    """
    cluster = Cluster.load(CLUSTER)
    job = load(str(PACKAGE / "zoo" / "gpt.py"))
    console.rule("1/4  capture the model")
    begun = time.perf_counter()
    graph = capture(job, MICRO_BATCHES[-1])
    console.print(graph_table(summarize(graph, time.perf_counter() - begun)))
    console.rule("2/4  measure this machine")
    profile = _measure(job, cluster, folder, budget_s, console)
    console.rule("3/4  search")
    found = _search(job, cluster.with_profile(profile), console)
    plan = found.plans[0]
    plan.save(folder / "plan.json")
    console.print(plan_table(found.plans, found.baselines))
    console.print(why_it_wins(found.plans, found.baselines))
    console.print(f"No plan is predicted below {format_seconds(found.lower_bound_s)} a step.")
    console.rule(f"4/4  train {steps} steps on {plan.mesh.devices} processes")
    text = str(PACKAGE / "data" / "fables.txt")
    summary = run(plan, job.source, Options(steps=steps, data=text, resume="none"))
    console.print(_outcome(plan, summary, folder))
    return summary


def _measure(job: TrainingJob, cluster: Cluster, folder: Path, budget_s: float, console: Console) -> Profile:
    path = folder / f"{cluster.name}-profile.json"
    kept, why = usable(path, cluster)
    if kept is None and path.is_file():
        console.print(f"{path} is measured anew: {why}")
    graphs: list[OpGraph] = [capture(job, size) for size in MICRO_BATCHES]
    with progress_bar("measuring", console) as hear:
        profile = profile_model(graphs, cluster, path=path, budget_s=budget_s, model=job.source, progress=hear)
    console.print(
        f"{len(profile.operators.entries)} operators and {len(profile.collectives)} collectives measured, kept in "
        f"{path}"
    )
    return profile


def _search(job: TrainingJob, cluster: Cluster, console: Console) -> SearchResult:
    with progress_bar("searching", console) as hear:
        return search(job, cluster, GLOBAL_BATCH, progress=hear)


def _outcome(plan: Plan, summary: dict[str, Any], folder: Path) -> str:
    predicted, measured = float(plan.estimate["step_time_s"]), float(summary["median_step_time_s"])
    return (
        f"Loss {summary['first_loss']:.3f} -> {summary['last_loss']:.3f} in {summary['steps']} steps. "
        f"Step time: predicted {format_seconds(predicted)}, measured {format_seconds(measured)} (median), "
        f"prediction off by {100 * (predicted / measured - 1):+.0f}%.\n"
        f"The plan is in {folder / 'plan.json'}. Next: autopar run {folder / 'plan.json'} --steps 100, "
        f"or autopar init model.py for a model of your own."
    )
