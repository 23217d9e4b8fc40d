"""``autopar explain``: where a plan's time and memory go, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion


def explain(
    plan: Annotated[Path, typer.Argument(help="plan.json from 'autopar search'.")],
    model: Annotated[str | None, typer.Option(help="model.py, if it has moved since the search.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's.", autocompletion=completion.clusters)
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    lang: Annotated[str, typer.Option(help="en or zh.", autocompletion=completion.words("en", "zh"))] = "en",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show where a plan's time and memory go, its first bottleneck, and what would help most.

    Example: autopar explain plan.json
    """
    import json

    from rich.console import Console

    from autopar.cli.common import load_cluster
    from autopar.report.explain import explain as take_apart
    from autopar.report.explain_text import explanation
    from autopar.report.language import Language
    from autopar.report.subject import load_subject

    language = Language(lang)
    about = load_subject(plan, model, cluster, lambda name: load_cluster(name, profile))
    found = take_apart(about)
    if json_output:
        typer.echo(json.dumps({**about.estimate.to_json(), **found.to_json()}))
        return
    console = Console()
    for part in explanation(about, found, language):
        console.print(part)
