"""Checkpoints: torch.distributed.checkpoint into a folder per step, written aside and renamed when whole.

Tensors are stored under the model's own parameter names, as the wholes that DTensors describe, so that a run goes on
on any other mesh: torch reads each process's part from whatever files hold it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.errors import InputError
from autopar.runtime.parallelize import ParallelModel

_FOLDER = re.compile(r"^step-(\d{8})$")


def save(model: ParallelModel, folder: Path, step: int, keep: int = 3) -> Path:
    """Writes the checkpoint ``step-NNNNNNNN``; every process must call it.

    Args:
        step: optimizer steps done.
        keep: how many checkpoints to keep; older ones are deleted once the new one is whole.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier()
    dcp.save(_state(model), checkpoint_id=str(aside), no_dist=not dist.is_initialized())
    if first:
        (aside / "run.json").write_text(json.dumps({"step": step, "fingerprint": model.graph.fingerprint}))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a folder, oldest first; partial ones are not among them."""
    found = [p for p in folder.glob("step-*") if _FOLDER.match(p.name) and (p / "run.json").is_file()]
    return sorted(found)


def find(resume: str, folder: Path | None) -> Path | None:
    """Which checkpoint to go on from.

    Args:
        resume: ``auto`` (the last one of the folder, if any), ``none``, or the path of one.

    Raises:
        InputError: the named checkpoint does not exist or is not whole.
    """
    if resume == "none":
        return None
    if resume == "auto":
        return checkpoints(folder)[-1] if folder is not None and checkpoints(folder) else None
    path = Path(resume)
    if (path / "run.json").is_file():
        return path
    inside = checkpoints(path) if path.is_dir() else []
    if inside:
        return inside[-1]
    raise InputError(f"--resume {resume!r} is no whole checkpoint", "Give a folder step-NNNNNNNN, auto or none")


def load(model: ParallelModel, path: Path) -> int:
    """Reads a checkpoint, whatever mesh wrote it; every process must call it.

    Returns:
        Optimizer steps done.

    Raises:
        InputError: it belongs to another model.
    """
    run = json.loads((path / "run.json").read_text())
    if run["fingerprint"] != model.graph.fingerprint:
        raise InputError(
            f"checkpoint {str(path)!r} belongs to another model", "Name one of this model, or --resume none"
        )
    _materialise(model)
    state = _state(model)
    dcp.load(state, checkpoint_id=str(path), no_dist=not dist.is_initialized())
    model.align_tied()
    model.steps_done = int(run["step"])
    return model.steps_done


def _state(model: ParallelModel) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for key, values in _optimizer_entries(model).items():
        state.update({f"{key}.{name}": value for name, value in values.items()})
    return state


def _optimizer_entries(model: ParallelModel) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name: ``optimizer.NAME`` -> its tensors, over the optimizer's own memory."""
    return {
        f"optimizer.{one.name}": {
            key: model.as_whole(one.name, value)
            if torch.is_tensor(value) and value.shape == one.parameter.shape
            else value
            for key, value in model.optimizer.state.get(one.parameter, {}).items()
        }
        for one in model.trained
    }


def _materialise(model: ParallelModel) -> None:
    """Makes the optimizer's state tensors, which exist only after a first step, without moving a parameter."""
    before = [one.parameter.detach().clone() for one in model.trained]
    for one in model.trained:
        one.parameter.grad = torch.zeros_like(one.parameter)
    model.optimizer.step()
    model.optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for one, value in zip(model.trained, before, strict=True):
            one.parameter.copy_(value)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
