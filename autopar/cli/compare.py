"""``autopar compare``: two plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    first: Annotated[Path, typer.Argument(help="A plan.json.")],
    second: Annotated[Path, typer.Argument(help="Another plan.json.")],
    profile: Annotated[Path | None, typer.Option(help="Measured profile, for both.")] = None,
    lang: Annotated[str, typer.Option(help="en or zh.")] = "en",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show two plans side by side: settings, predicted time and memory, placements.

    Example: autopar compare plan.json other.json
    """
    import json

    from rich.console import Console

    from autopar.cli.common import load_cluster
    from autopar.report.compare import compare_json, compare_table
    from autopar.report.language import Language
    from autopar.report.subject import load_subject

    language = Language(lang)
    one, other = (load_subject(path, attach=lambda name: load_cluster(name, profile)) for path in (first, second))
    if json_output:
        typer.echo(json.dumps(compare_json(one, other)))
    else:
        Console().print(compare_table(one, other, language))
