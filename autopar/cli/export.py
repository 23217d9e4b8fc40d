"""``autopar export``: a plan as a settings file of another trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion
from autopar.export import TARGETS


def export(
    plan: Annotated[Path, typer.Argument(help="plan.json from 'autopar search'.")],
    to: Annotated[
        str,
        typer.Option(
            help="torchtitan, megatron, deepspeed, fsdp, accelerate or slurm.",
            autocompletion=completion.words(*TARGETS),
        ),
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="File to write; unset, stdout.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Devices of one node; unset, as in the plan's cluster.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a plan as a settings file of another trainer, and say what that trainer cannot be told.

    Example: autopar export plan.json --to deepspeed -o ds_config.json
    """
    import json

    from autopar.export import export as make
    from autopar.plan import Plan, write_text

    made = make(Plan.load(plan), to, devices_per_node)
    if output is not None:
        write_text(output, made.text)
    use = made.use.replace("FILE", str(output) if output else "FILE")
    if json_output:
        document = {"target": made.target, "file": str(output) if output else None, "text": made.text}
        typer.echo(json.dumps({**document, "use": use, "not_expressed": list(made.not_expressed)}))
        return
    if output is None:
        typer.echo(made.text, nl=False)
    for sentence in made.not_expressed:
        typer.echo(f"not expressed: {sentence}", err=True)
    typer.echo(f"use: {use}", err=True)
