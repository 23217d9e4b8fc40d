"""``autopar run``: train with a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def run(
    plan: Annotated[Path, typer.Argument(help="plan.json from 'autopar search'.")],
    model: Annotated[str | None, typer.Argument(help="model.py, if it has moved since the search.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to do in all.")] = 20,
    data: Annotated[str | None, typer.Option(help="Text file (bytes) or .bin (uint16 tokens) to train on.")] = None,
    checkpoint_dir: Annotated[str | None, typer.Option(help="Write checkpoints here.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    keep_checkpoints: Annotated[int, typer.Option(min=1, help="How many of the newest checkpoints to keep.")] = 3,
    resume: Annotated[str, typer.Option(help="auto, none, or the path of a checkpoint.")] = "auto",
    weights: Annotated[
        str | None, typer.Option(help="Checkpoint or .safetensors file to take the first weights from.")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Write one JSON object a step to this file.")] = None,
    tensorboard: Annotated[str | None, typer.Option(help="Write the same numbers for TensorBoard here.")] = None,
    profile: Annotated[str | None, typer.Option(help="Write Chrome traces of three steps to this folder.")] = None,
    nonfinite: Annotated[str, typer.Option(help="At a NaN or infinite loss or gradient: stop, or skip.")] = "stop",
    clip: Annotated[float | None, typer.Option(min=0, help="Clip the global gradient norm to this.")] = None,
    lr_schedule: Annotated[
        str | None, typer.Option(help="constant, linear, cosine or wsd; unset, the checkpoint's, else constant.")
    ] = None,
    warmup_steps: Annotated[int, typer.Option(help="Steps of linear warm-up.")] = 0,
    decay_steps: Annotated[int | None, typer.Option(help="Last steps, in which wsd decays.")] = None,
    min_lr: Annotated[float, typer.Option(help="Share of the learning rate at the last step.")] = 0.0,
    lr_scaling: Annotated[str | None, typer.Option(help="linear or sqrt, with the global batch.")] = None,
    reference_batch: Annotated[int | None, typer.Option(help="Global batch that the optimizer's rate is for.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for a silent process.")] = 300.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Train with a plan: starts the processes here, or joins those that torchrun started.

    Example: autopar run plan.json --steps 20 --metrics metrics.jsonl
    """
    import json
    import os

    from autopar.files import check_output
    from autopar.plan import Plan
    from autopar.runtime.launch import run as launch
    from autopar.runtime.learning_rate import LearningRate
    from autopar.runtime.trainer import Options
    from autopar.units import format_seconds

    rate = LearningRate(
        lr_schedule or "constant",
        warmup_steps,
        decay_steps,
        min_lr,
        scaling=lr_scaling,
        reference_batch=reference_batch,
    )
    if checkpoint_dir is not None:
        check_output(Path(checkpoint_dir), "--checkpoint-dir", folder=True)
    if metrics is not None:
        check_output(Path(metrics), "--metrics")
    chosen = Plan.load(plan)
    options = Options(
        steps=steps,
        data=data,
        checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every,
        keep_checkpoints=keep_checkpoints,
        resume=resume,
        metrics=metrics,
        tensorboard=tensorboard,
        profile=profile,
        nonfinite=nonfinite,
        max_grad_norm=clip,
        weights=weights,
        learning_rate=rate if lr_schedule or rate != LearningRate() else None,
    )
    summary = launch(chosen, model or chosen.model.source, options, timeout)
    if os.environ.get("RANK", "0") != "0":
        return
    if json_output:
        typer.echo(json.dumps(summary))
    elif summary["steps_this_run"]:
        predicted = summary["predicted_step_time_s"]
        beside = f", predicted {format_seconds(predicted)}" if predicted else ""
        typer.echo(
            f"{summary['steps']} steps on {summary['processes']} processes: loss {summary['first_loss']:.4f} -> "
            f"{summary['last_loss']:.4f}, median step {format_seconds(summary['median_step_time_s'])}{beside}"
        )
    else:
        typer.echo(f"nothing to do: {summary['steps']} steps are done")
