"""``autopar profile``: measures this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli import completion
from autopar.errors import InputError

if TYPE_CHECKING:
    from autopar.hardware import Cluster, Profile


def profile(
    model: Annotated[str | None, typer.Argument(help="model.py or hf:PATH whose operators to measure.")] = None,
    cluster: Annotated[
        str, typer.Option(help="Cluster whose node this machine is.", autocompletion=completion.clusters)
    ] = "local-cpu-2",
    collectives: Annotated[bool, typer.Option("--collectives", help="Only collectives and overheads.")] = False,
    device: Annotated[
        bool, typer.Option("--device", help="Common operators over many sizes, without a model.")
    ] = False,
    micro_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Micro-batch size to measure; repeat for more.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend on operators.")] = 45.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Profile to write, or to take up again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")] = False,
) -> None:
    """Measure operators, collectives and memory on this machine, for search and estimate to use.

    Example: autopar profile model.py --cluster local-cpu-2 -o profiles/measured/local-cpu-2.json
    """
    from autopar.hardware import Cluster
    from autopar.profiler import default_path, usable

    if sum([model is not None, collectives, device]) != 1:
        raise InputError("profile needs one of MODEL, --collectives and --device", "See 'autopar profile --help'")
    if not budget > 0:
        raise InputError(f"--budget {budget} is not positive", "Give seconds")
    where = Cluster.load(cluster)
    path = output or default_path(where)
    if path.is_file():
        _, why = usable(path, where)
        typer.echo(f"{path}: measured anew, {why}" if why else f"{path}: taken up again", err=True)
    result = _measure(model, device, where, path, micro_batch or [1, 2, 4, 8], budget)
    summary = _summary(result, path)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        for key, value in summary.items():
            typer.echo(f"{key}: {value}")


def _measure(
    model: str | None, device: bool, cluster: Cluster, path: Path, micro_batches: list[int], budget: float
) -> Profile:
    from autopar.profiler import profile_collectives, profile_device, profile_model
    from autopar.report.progress import progress_bar

    with progress_bar("measuring") as progress:
        if device:
            return profile_device(cluster, path=path, budget_s=budget, progress=progress)
        if model is None:
            return profile_collectives(cluster, path=path, budget_s=budget, progress=progress)
        from autopar.model.capture import capture
        from autopar.model.spec import load

        job = load(model)
        graphs = []
        for size in sorted(set(micro_batches)):
            progress(0, 0, f"capturing {size} samples")
            graphs.append(capture(job, size, cluster.device.kind))
        return profile_model(graphs, cluster, path=path, budget_s=budget, model=model, progress=progress)


def _summary(profile: Profile, path: Path) -> dict[str, Any]:
    return {
        "profile": str(path),
        "cluster": profile.cluster,
        "device": profile.device,
        "date": profile.date,
        "fingerprint": vars(profile.fingerprint),
        "operators": len(profile.operators.entries),
        "collectives": len(profile.collectives),
        "overheads": vars(profile.overheads),
        "context_bytes": profile.memory.context_bytes,
        "method": profile.method,
    }
