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
    why: Annotated[
        str | None,
        typer.Option(help="Why not this choice? As tp=4 or recompute=none; searches again."),
    ] = None,
    lang: Annotated[str, typer.Option(help="en or zh.", autocompletion=completion.words("en", "zh"))] = "en",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show where a plan's time and memory go, its first bottleneck, and what would help most.

    Example: autopar explain plan.json --why tp=2
    """
    import json

    from rich.console import Console

    from autopar.cli.common import load_cluster
    from autopar.model.spec import load
    from autopar.report.explain import explain as take_apart
    from autopar.report.explain_text import explanation
    from autopar.report.language import Language
    from autopar.report.subject import load_subject
    from autopar.report.why import sentence, why_not

    language = Language(lang)
    about = load_subject(plan, model, cluster, lambda name: load_cluster(name, profile))
    found = take_apart(about)
    answer = None if why is None else why_not(load(model or about.plan.model.source), about, why)
    if json_output:
        asked = {} if answer is None else {"why": answer.to_json()}
        typer.echo(json.dumps({**about.estimate.to_json(), **found.to_json(), **asked}))
        return
    console = Console()
    for part in explanation(about, found, language):
        console.print(part)
    if answer is not None:
        console.print(sentence(answer, language))
