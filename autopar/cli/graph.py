"""``autopar graph``: what was captured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def graph(
    model: Annotated[str, typer.Argument(help="model.py, or hf:PATH of a config.json.")],
    batch: Annotated[int, typer.Option(min=1, help="Micro-batch size that shapes are shown for.")] = 2,
    png: Annotated[Path | None, typer.Option(help="Draw the chain of blocks into a .png or .svg.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what was captured of a model, by block kind.

    Example: autopar graph model.py --png model.png
    """
    import json
    import time

    from rich.console import Console

    from autopar.model.capture import capture
    from autopar.model.spec import load
    from autopar.model.summary import summarize
    from autopar.report.tables import graph_table

    if png is not None:
        from autopar.report.plots.chain import chain
        from autopar.report.plots.style import check_format, save

        check_format(png)
    begun = time.perf_counter()
    captured = capture(load(model), batch)
    summary = summarize(captured, time.perf_counter() - begun)
    if png is not None:
        save(chain(captured), png)
    if json_output:
        typer.echo(json.dumps(summary))
    else:
        Console().print(graph_table(summary))
