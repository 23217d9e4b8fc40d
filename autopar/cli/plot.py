"""``autopar plot``: pictures of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion


def plot(
    plan: Annotated[Path, typer.Argument(help="plan.json; with --kind accuracy a CSV of measured runs.")],
    kind: Annotated[
        str,
        typer.Option(
            help="timeline, memory, memory-over-time, breakdown, topology or block; frontier, scaling, batches or "
            "lengths (of hf: models), which search again; or accuracy."
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A .png or .svg; unset, KIND.png.")] = None,
    block: Annotated[str | None, typer.Option(help="Kind of block to draw; unset, the most frequent.")] = None,
    model: Annotated[str | None, typer.Option(help="model.py, if it has moved since the search.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's.", autocompletion=completion.clusters)
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Draw a plan: its timeline, memory, time, network and placements, or how the best plan changes.

    Example: autopar plot plan.json --kind timeline -o timeline.svg
    """
    import json

    from autopar.cli.common import load_cluster
    from autopar.errors import InputError
    from autopar.model.spec import load
    from autopar.report.plots import kinds
    from autopar.report.plots.block_graph import block_graph
    from autopar.report.plots.style import check_format, save
    from autopar.report.subject import load_subject

    target = output or Path(f"{kind}.png")
    if kind not in (*kinds.NAMES, "accuracy"):
        raise InputError(f"--kind {kind!r} is unknown", f"Use one of {', '.join(kinds.NAMES)}, accuracy")
    if block is not None and kind != "block":
        raise InputError(f"--block {block!r} does not go with --kind {kind}", "Use --kind block")
    check_format(target)
    if kind == "accuracy":
        save(kinds.of_runs(plan), target)
    else:
        about = load_subject(plan, model, cluster, lambda name: load_cluster(name, profile))
        if kind == "block":
            save(block_graph(about, block), target)
        elif kind in kinds.OF_PLAN:
            save(kinds.OF_PLAN[kind](about), target)
        else:
            save(kinds.SEARCHED[kind](load(model or about.plan.model.source), about), target)
    typer.echo(json.dumps({"file": str(target), "kind": kind}) if json_output else f"{target} written")
