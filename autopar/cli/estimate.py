"""``autopar estimate``: predict the step time and memory of a plan, or of the settings of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import completion

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster
    from autopar.model.spec import TrainingJob


def estimate(
    model: Annotated[str, typer.Argument(help="model.py, or hf:PATH of a config.json.")],
    cluster: Annotated[
        str, typer.Option(help="Name or path of a cluster; see 'autopar clusters'.", autocompletion=completion.clusters)
    ],
    global_batch: Annotated[
        int | None, typer.Option(help="Samples per optimizer step; unset, as --plan or --from says.")
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="plan.json to estimate.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Without a plan: choices to keep, as tp=2.")] = None,
    present: Annotated[
        tuple[str, str] | None,
        typer.Option("--from", help="torchtitan or megatron, and a file with its settings (or its flags in quotes)."),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    precision: Annotated[str, typer.Option(help="With --pin: fp32 or bf16.")] = "fp32",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict the step time and memory of a plan, of the best plan under some pins, or of another trainer's settings.

    Example: autopar estimate model.py --cluster local-cpu-2 --global-batch 16 --pin tp=2

    Example: autopar estimate model.py --cluster dgx-a100-8 --from megatron launch.sh
    """
    from autopar.cli.common import load_cluster
    from autopar.errors import InputError
    from autopar.model.spec import load

    given = {"--plan": plan, "--pin": pin, "--from": present}
    both = [name for name, value in given.items() if value]
    if len(both) > 1:
        raise InputError(f"{both[0]} and {both[1]} are both given", "Give one of them")
    job, where = load(model), load_cluster(cluster, profile)
    if present is not None:
        _of_settings(job, where, present, global_batch, json_output)
    else:
        _of_plan(job, where, plan, global_batch, pin or [], precision, json_output)


def _of_plan(
    job: TrainingJob,
    where: Cluster,
    plan: Path | None,
    global_batch: int | None,
    pins: list[str],
    precision: str,
    json_output: bool,
) -> None:
    import json

    from rich.console import Console

    from autopar.cost.estimate import estimate as predict
    from autopar.errors import InputError
    from autopar.plan import Plan
    from autopar.planner.planner import search
    from autopar.planner.space import parse_pins
    from autopar.report.tables import estimate_table

    if plan is not None:
        chosen = Plan.load(plan)
        if chosen.global_batch != (global_batch or chosen.global_batch):
            raise InputError(
                f"--global-batch {global_batch} is not the plan's, {chosen.global_batch}", "Search again for this batch"
            )
    elif global_batch is None:
        raise InputError("--global-batch is missing", "Give the samples of one optimizer step, or --plan or --from")
    else:
        chosen = search(job, where, global_batch, precision=precision, pins=parse_pins(pins), top=1).plans[0]
    result = predict(job, chosen, where).to_json()
    result["optimality_gap"] = chosen.optimality_gap
    result["search_time_s"] = chosen.search.get("search_time_s")
    if json_output:
        typer.echo(json.dumps(result))
    else:
        Console().print(estimate_table(chosen, result))


def _of_settings(
    job: TrainingJob, where: Cluster, present: tuple[str, str], global_batch: int | None, json_output: bool
) -> None:
    """What present settings cost, and what would be faster."""
    import json

    from rich.console import Console

    from autopar.cli.search import summary_of
    from autopar.export.present import plan_of, with_faster
    from autopar.export.settings import batch_of, read_settings
    from autopar.report.progress import progress_bar
    from autopar.report.tables import estimate_table, plan_table, why_it_wins

    settings = read_settings(*present)
    batch = batch_of(settings, global_batch)
    with progress_bar("searching", start="capturing") as progress:
        own = plan_of(settings, job, where, batch)
        better = with_faster(own, job, where, batch, settings.precision, progress)
    notes = [f"said and not priced: {note}" for note in settings.notes]
    if json_output:
        document: dict[str, Any] = {**own.estimate, "global_batch": batch, "not_priced": list(settings.notes)}
        typer.echo(json.dumps({**document, "plan": summary_of(own), "plans": [summary_of(p) for p in better]}))
        return
    console, baseline = Console(), [("present", own, "")]
    console.print(estimate_table(own, own.estimate))
    console.print(plan_table(better, baseline))
    if better:
        console.print(why_it_wins(better, baseline))
    else:
        console.print("Nothing that autopar can search is predicted to fit.")
    for note in notes:
        console.print(note)
    console.print("Priced as autopar's own runtime would run it, with the best placements of single operators.")
