"""``autopar init``: a model.py to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("model.py"),
    template: Annotated[str, typer.Option(help="Which model of the zoo to start from.")] = "gpt",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a ready model.py to start from.

    Example: autopar init model.py --template gpt
    """
    from autopar.zoo import write_template

    write_template(template, path, force=force)
    typer.echo(f"Wrote {path}. Next: autopar graph {path}", err=True)
