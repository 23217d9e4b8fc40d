"""Checkpoints: which to go on from, and going on. :mod:`autopar.runtime.checkpoint_writer` writes them.

Tensors are stored under the model's own parameter names, as the wholes that DTensors describe, so that a run goes on
on any other mesh: torch reads each process's part from whatever files hold it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp

from autopar.errors import InputError
from autopar.runtime.checksums import RUN, damage
from autopar.runtime.loss_scale import LossScale
from autopar.runtime.parallelize import ParallelModel

_T = TypeVar("_T")
_FOLDER = re.compile(r"^step-(\d{8})$")


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first; unfinished ones are not among them."""
    return [p for p in _numbered(folder) if (p / RUN).is_file()]


def find(resume: str, folder: Path | None, say: Callable[[str], None]) -> Path | None:
    """Which checkpoint to go on from; every process must call it, and each reads and checks its share of the files.

    Of a folder of checkpoints the newest that is whole is taken.

    Args:
        resume: ``auto`` (the newest of the folder, if any), ``none``, or the path of one or of a folder of them.
        say: gets a line for each checkpoint that is passed over, on the first process.

    Raises:
        InputError: the named checkpoint does not exist or is not whole, or no checkpoint of the folder is.
    """
    if resume == "none" or (resume == "auto" and folder is None):
        return None
    if resume == "auto":
        assert folder is not None
        return _newest(folder, say)
    path = Path(resume)
    inside = None if _FOLDER.match(path.name) or not _agreed(path.is_dir()) else _newest(path, say)
    if inside is not None:
        return inside
    wrong = _damage(path)
    if wrong:
        raise InputError(
            f"--resume {str(path)!r} is no whole checkpoint: {wrong}", "Give a folder step-NNNNNNNN, auto or none"
        )
    return path


def _newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    found, unfinished = _agreed((_numbered(folder), partial(folder)))
    if _first():
        for left in unfinished:
            say(f"checkpoint {left} was never finished and is passed over")
    for path in reversed(found):
        wrong = _damage(path)
        if wrong is None:
            return path
        if _first():
            say(f"checkpoint {path} is damaged and passed over: {wrong}")
    if found:
        raise InputError(
            f"no checkpoint in {str(folder)!r} is whole, the newest is {found[-1].name}",
            "Restore one, or start anew with --resume none",
        )
    return None


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, the same on every process; each checks its share of the files."""
    if not dist.is_initialized():
        return damage(path)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, damage(path, dist.get_rank(), dist.get_world_size()))
    return next((wrong for wrong in found if wrong), None)


def _agreed(value: _T) -> _T:
    """What the first process sees of the file system."""
    box: list[Any] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    agreed: _T = box[0]
    return agreed


def _numbered(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if _FOLDER.match(p.name))


def partial(folder: Path) -> list[Path]:
    """Checkpoints of a folder that were never finished."""
    return sorted(folder.glob(".step-*.partial"))


def load(model: ParallelModel, path: Path) -> int:
    """Reads a checkpoint, whatever mesh wrote it; every process must call it.

    Returns:
        Optimizer steps done.

    Raises:
        InputError: it belongs to another model.
    """
    run = settings(path)
    if run["fingerprint"] != model.graph.fingerprint:
        raise InputError(
            f"checkpoint {str(path)!r} belongs to another model", "Name one of this model, or --resume none"
        )
    _materialise(model)
    state = state_of(model)
    dcp.load(state, checkpoint_id=str(path), no_dist=not dist.is_initialized())
    model.align_tied()
    if model.loss_scale is not None and run.get("loss_scale"):
        model.loss_scale = LossScale(**run["loss_scale"])
    model.steps_done = int(run["step"])
    return model.steps_done


def settings(path: Path) -> dict[str, Any]:
    """What run.json of a checkpoint says of its run."""
    found: dict[str, Any] = json.loads((path / RUN).read_text())
    return found


def state_of(model: ParallelModel) -> dict[str, Any]:
    """This process's part of what a checkpoint holds, over the model's own memory, by its key in there."""
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


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
