"""``autopar estimate``: predict the step time and memory of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def estimate(
    model: Annotated[str, typer.Argument(help="model.py, or hf:PATH of a config.json.")],
    cluster: Annotated[str, typer.Option(help="Name or path of a cluster; see 'autopar clusters'.")],
    global_batch: Annotated[int, typer.Option(help="Samples per optimizer step.")],
    plan: Annotated[Path | None, typer.Option(help="plan.json to estimate.")] = None,
    pin: Annotated[list[str] | None, typer.Option(help="Without a plan: choices to keep, as tp=2.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    precision: Annotated[str, typer.Option(help="Without a plan: fp32 or bf16.")] = "fp32",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Predict the step time and memory of a plan, or of the best plan under some pins.

    Example: autopar estimate model.py --cluster local-cpu-2 --global-batch 16 --pin tp=2
    """
    import json

    from rich.console import Console

    from autopar.cli.common import load_cluster
    from autopar.cost.estimate import estimate as predict
    from autopar.errors import InputError
    from autopar.model.spec import load
    from autopar.plan import Plan
    from autopar.planner.planner import search
    from autopar.planner.space import parse_pins
    from autopar.report.tables import estimate_table

    job, where = load(model), load_cluster(cluster, profile)
    if plan is not None:
        if pin:
            raise InputError("--plan and --pin are both given", "Give one of them")
        chosen = Plan.load(plan)
        if chosen.global_batch != global_batch:
            raise InputError(
                f"--global-batch {global_batch} is not the plan's, {chosen.global_batch}", "Search again for this batch"
            )
    else:
        chosen = search(job, where, global_batch, precision=precision, pins=parse_pins(pin or []), top=1).plans[0]
    result = predict(job, chosen, where).to_json()
    result["optimality_gap"] = chosen.optimality_gap
    result["search_time_s"] = chosen.search.get("search_time_s")
    if json_output:
        typer.echo(json.dumps(result))
    else:
        Console().print(estimate_table(chosen, result))
