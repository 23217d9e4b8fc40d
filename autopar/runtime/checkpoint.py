"""Checkpoints: torch.distributed.checkpoint into a folder per step, written aside and renamed when whole.

Tensors are stored under the model's own parameter names, as the wholes that DTensors describe, so that a run goes on
on any other mesh: torch reads each process's part from whatever files hold it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.errors import InputError
from autopar.runtime.checksums import RUN, checksums, damage
from autopar.runtime.parallelize import ParallelModel

_FOLDER = re.compile(r"^step-(\d{8})$")


def save(model: ParallelModel, folder: Path, step: int, keep: int = 3) -> Path:
    """Writes the checkpoint ``step-NNNNNNNN``; every process must call it.

    Args:
        step: optimizer steps done.
        keep: how many checkpoints to keep; older ones are deleted once the new one is whole.
    """
    final, aside = folder / f"step-{step:08d}", folder / f".step-{step:08d}.partial"
    first = _first()
    if first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    _barrier()
    dcp.save(_state(model), checkpoint_id=str(aside), no_dist=not dist.is_initialized())
    if first:
        run = {"step": step, "fingerprint": model.graph.fingerprint, "files": checksums(aside)}
        (aside / RUN).write_text(json.dumps(run))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(aside, final)
        before = [p for p in checkpoints(folder) if p.name <= final.name]  # a later one may be of another run
        for old in [*before[:-keep], *_partial(folder)]:
            shutil.rmtree(old, ignore_errors=True)
    _barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a folder, oldest first; unfinished ones are not among them."""
    return [p for p in _numbered(folder) if (p / RUN).is_file()]


def find(resume: str, folder: Path | None, say: Callable[[str], None]) -> Path | None:
    """Which checkpoint to go on from; every process must call it.

    The first process reads every file of the chosen one and compares checksums. Of a folder of checkpoints the newest
    that is whole is taken.

    Args:
        resume: ``auto`` (the newest of the folder, if any), ``none``, or the path of one or of a folder of them.
        say: gets a line for each checkpoint that is passed over, on the first process.

    Raises:
        InputError: the named checkpoint does not exist or is not whole, or no checkpoint of the folder is.
    """
    if resume == "none" or (resume == "auto" and folder is None):
        return None
    answer: list[Any] = [None]
    if _first():
        try:
            answer = [_newest(folder, say) if resume == "auto" and folder else _named(Path(resume), say)]
        except InputError as error:
            answer = [(error.what, error.remedy)]
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], tuple):
        raise InputError(*answer[0])
    found: Path | None = answer[0]
    return found


def _named(path: Path, say: Callable[[str], None]) -> Path:
    inside = None if _FOLDER.match(path.name) or not path.is_dir() else _newest(path, say)
    if inside is not None:
        return inside
    wrong = damage(path)
    if wrong:
        raise InputError(
            f"--resume {str(path)!r} is no whole checkpoint: {wrong}", "Give a folder step-NNNNNNNN, auto or none"
        )
    return path


def _newest(folder: Path, say: Callable[[str], None]) -> Path | None:
    for left in _partial(folder):
        say(f"checkpoint {left} was never finished and is passed over")
    found = _numbered(folder)
    for path in reversed(found):
        wrong = damage(path)
        if wrong is None:
            return path
        say(f"checkpoint {path} is damaged and passed over: {wrong}")
    if found:
        raise InputError(
            f"no checkpoint in {str(folder)!r} is whole, the newest is {found[-1].name}",
            "Restore one, or start anew with --resume none",
        )
    return None


def _numbered(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if _FOLDER.match(p.name))


def _partial(folder: Path) -> list[Path]:
    return sorted(folder.glob(".step-*.partial"))


def load(model: ParallelModel, path: Path) -> int:
    """Reads a checkpoint, whatever mesh wrote it; every process must call it.

    Returns:
        Optimizer steps done.

    Raises:
        InputError: it belongs to another model.
    """
    run = json.loads((path / RUN).read_text())
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


def _first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
