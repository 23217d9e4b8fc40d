"""``autopar report``: a plan as a page to send, and the simulated step as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion


def report(
    plan: Annotated[Path, typer.Argument(help="plan.json from 'autopar search'.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="An .html file to write.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A .json file for the simulated step; opens in ui.perfetto.dev.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model.py, if it has moved since the search.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Another cluster than the plan's.", autocompletion=completion.clusters)
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Measured profile, from 'autopar profile'.")] = None,
    lang: Annotated[str, typer.Option(help="en or zh.", autocompletion=completion.words("en", "zh"))] = "en",
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write one self-contained HTML page about a plan: summary, plots, tables, assumptions and sources.

    Example: autopar report plan.json -o report.html --trace trace.json
    """
    import json

    from autopar.cli.common import load_cluster
    from autopar.errors import InputError
    from autopar.files import check_ending, replacing
    from autopar.report.html import report as page
    from autopar.report.language import Language
    from autopar.report.subject import load_subject
    from autopar.report.trace import save_trace

    language = Language(lang)
    if output is None and trace is None:
        raise InputError(
            "report has nothing to write", "Name a page with -o report.html, a trace with --trace, or both"
        )
    for target, ending in ((output, ".html"), (trace, ".json")):
        if target is not None:
            check_ending(target, ending)
    about = load_subject(plan, model, cluster, lambda name: load_cluster(name, profile))
    if output is not None:
        with replacing(output, InputError) as aside:
            aside.write_text(page(about, language), encoding="utf-8")
    if trace is not None:
        save_trace(about, trace)
    if json_output:
        typer.echo(json.dumps({"page": output and str(output), "trace": trace and str(trace)}))
        return
    for written, hint in ((output, ""), (trace, "; open it in ui.perfetto.dev")):
        if written is not None:
            typer.echo(f"{written} written{hint}")
