"""The command line: one module per command, errors as one line, exit codes as documented.

0 done, 1 a run failed, 2 bad input, 3 no plan fits. ``--debug`` before the command shows a traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autopar.cli.clusters import clusters
from autopar.cli.compare import compare
from autopar.cli.demo import demo
from autopar.cli.devices import devices
from autopar.cli.estimate import estimate
from autopar.cli.explain import explain
from autopar.cli.export import export
from autopar.cli.graph import graph
from autopar.cli.init import init
from autopar.cli.plot import plot
from autopar.cli.profile import profile
from autopar.cli.report import report
from autopar.cli.run import run
from autopar.cli.search import search
from autopar.cli.validate import validate
from autopar.cli.weights import weights
from autopar.errors import AutoparError

app = typer.Typer(
    name="autopar",
    help="Find, prove and run the best way to train a PyTorch model in parallel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    search,
    graph,
    estimate,
    explain,
    compare,
    plot,
    report,
    run,
    profile,
    weights,
    export,
    validate,
    init,
    devices,
    clusters,
    demo,
):
    app.command()(command)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Find, prove and run the best way to train a PyTorch model in parallel."""


def main() -> None:
    """Entry point of the console script."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv = [sys.argv[0], *(word for word in sys.argv[1:] if word != "--debug")]
    try:
        app()
    except AutoparError as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
