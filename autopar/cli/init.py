"""``autopar init``: a model.py to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli import completion


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("model.py"),
    template: Annotated[
        str, typer.Option(help="Which model of the zoo to start from.", autocompletion=completion.templates)
    ] = "gpt",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a ready model.py to start from.

    Example: autopar init model.py --template gpt
    """
    import json

    from autopar.zoo import write_template

    write_template(template, path, force=force)
    if json_output:
        typer.echo(json.dumps({"file": str(path), "template": template}))
    typer.echo(f"Wrote {path}. Next: autopar graph {path}", err=True)
