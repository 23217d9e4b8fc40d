"""``autopar demo``: the whole way on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    folder: Annotated[Path, typer.Option(help="Where plan.json and the measured profile are left.")] = Path("."),
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to train.")] = 30,
    budget: Annotated[float, typer.Option(min=1, help="Seconds to spend on measuring operators.")] = 45.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the run's summary as one JSON document.")] = False,
) -> None:
    """Capture a small GPT, measure this machine, search, and train with the winner on two processes.

    Example: autopar demo
    """
    import json

    from rich.console import Console

    from autopar.demo import demo as run_demo
    from autopar.errors import InputError

    if not folder.is_dir():
        raise InputError(f"--folder {str(folder)!r} does not exist", "Make it first")
    summary = run_demo(folder, steps, budget, Console(stderr=json_output))
    if json_output:
        typer.echo(json.dumps(summary))
