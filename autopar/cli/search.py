"""``autopar search``: find the best plan for a model on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import completion

if TYPE_CHECKING:
    from autopar.planner.planner import SearchResult


def search(
    model: Annotated[str, typer.Argument(help="model.py, or hf:PATH of a config.json.")],
    cluster: Annotated[
        str, typer.Option(help="Name or path of a cluster; see 'autopar clusters'.", autocompletion=completion.clusters)
    ],
    global_batch: Annotated[int, typer.Option(help="Samples per optimizer step, over all devices.")],
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    precision: Annotated[
        str, typer.Option(help="fp32 or bf16.", autocompletion=completion.words("fp32", "bf16"))
    ] = "fp32",
    pin: Annotated[
        list[str] | None, typer.Option(help="A choice to keep, as tp=2, tp<=8 or schedule=gpipe; repeat for more.")
    ] = None,
    forbid: Annotated[
        list[str] | None, typer.Option(help="A choice not to make, as tp=8 or recompute=full; repeat for more.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="A plan.json to show beside the baselines.")] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    time_limit: Annotated[float | None, typer.Option(help="Seconds; then the best plan so far is taken.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write the best plan.")] = None,
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the best plan to train a model on a cluster, and prove how good it is.

    Example: autopar search model.py --cluster local-cpu-2 --global-batch 16 -o plan.json
    """
    import json

    from rich.console import Console

    from autopar.cli.common import load_cluster
    from autopar.model.spec import load
    from autopar.planner.space import check_settings, parse_pins
    from autopar.report.language import Language
    from autopar.report.tables import plan_table, proof, why_it_wins

    language = Language(lang)
    pins = parse_pins(pin or [], forbid or [])
    if output is not None:
        _check_writable(output)
    where = load_cluster(cluster, profile)
    check_settings(global_batch, precision, top, where, time_limit)
    job = load(model)
    beside = [] if compare is None else [_beside(compare, job, where)]
    found = _search(job, where, global_batch, precision, pins, top, time_limit)
    found.baselines.extend(beside)
    if output is not None:
        found.plans[0].save(output)
    if json_output:
        typer.echo(json.dumps(_document(found)))
        return
    console = Console()
    console.print(plan_table(found.plans, found.baselines, language=language))
    console.print(why_it_wins(found.plans, found.baselines, language))
    gap = found.plans[0].optimality_gap or 0.0
    console.print(proof(found.lower_bound_s, gap, found.search_time_s, found.complete, language))
    if output is not None:
        console.print(language.say("Plan written to {path}", path=output))


def _search(
    job: Any, where: Any, batch: int, precision: str, pins: dict[str, str], top: int, limit: float | None
) -> SearchResult:
    from autopar.planner.planner import search as search_plans
    from autopar.report.progress import progress_bar

    with progress_bar("searching", start="capturing") as progress:
        return search_plans(job, where, batch, precision, pins, top, limit, progress)


def _beside(path: Path, job: Any, where: Any) -> tuple[str, Any, str]:
    """A plan of the user's own as a baseline, estimated on this cluster."""
    from autopar.cost.estimate import estimate
    from autopar.plan import Plan

    plan = Plan.load(path)
    found = estimate(job, plan, where)
    numbers = found.to_json()
    if not found.fits:
        return path.stem, None, f"needs {numbers['peak_reserved_gib']:.2f} GiB per device"
    return path.stem, plan.model_copy(update={"estimate": numbers}), ""


def _check_writable(path: Path) -> None:
    """Before a long search rather than after it."""
    import os

    from autopar.errors import InputError

    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"output folder {str(folder)!r} does not exist", "Make it, or write elsewhere")
    if path.is_dir():
        raise InputError(f"output {str(path)!r} is a folder", "Name a file, such as plan.json")
    if not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise InputError(f"output {str(path)!r} cannot be written", "Write elsewhere")


def _document(found: SearchResult) -> dict[str, Any]:
    """One JSON document: the best plan's estimate at the top, every plan's in ``plans``."""
    return {
        **found.plans[0].estimate,
        "lower_bound_s": found.lower_bound_s,
        "complete": found.complete,
        "plans": [summary_of(plan) for plan in found.plans],
        "baselines": [
            {"name": name, "reason": reason, **({} if plan is None else summary_of(plan))}
            for name, plan, reason in found.baselines
        ],
        "rejected": [{"candidate": what, "reason": reason} for what, reason in found.rejected],
    }


def summary_of(plan: Any) -> dict[str, Any]:
    """A plan's estimate with its settings, as ``--json`` prints it."""
    from autopar.report.tables import recompute_of

    return {
        **plan.estimate,
        "micro_batch": plan.micro_batch,
        "micro_batches": plan.micro_batches,
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "recompute": recompute_of(plan),
        "zero_stage": plan.zero_stage,
        "stages": plan.stages,
    }
