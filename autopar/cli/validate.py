"""``autopar validate``: predicted against measured, for a table of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def validate(
    runs: Annotated[Path | None, typer.Argument(help="CSV of measured runs; unset, the published ones.")] = None,
    by: Annotated[str, typer.Option(help="Column to summarise by.")] = "group",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Compare predictions with measured training runs, row by row and by group.

    Example: autopar validate --by gpu
    """
    import json

    from rich.console import Console

    from autopar.hardware.locations import data_file
    from autopar.validate.tables import rows_table, summary_table
    from autopar.validate.validate import validate as compare

    log = Console(stderr=True)
    path = runs if runs is not None else data_file("measured/training_runs.csv")
    with log.status("reading runs") as status:
        report = compare(path, by, lambda done, total, name: status.update(f"{done}/{total} {name}"))
    if json_output:
        typer.echo(json.dumps(report.to_json()))
        return
    console = Console()
    console.print(rows_table(report))
    console.print(summary_table(report, by))
