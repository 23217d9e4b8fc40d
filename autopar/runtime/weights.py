"""Weights alone: of a checkpoint or a safetensors file, under the model's own parameter names."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import InputError
from autopar.files import replacing
from autopar.runtime.checkpoint import settings
from autopar.runtime.checksums import damage
from autopar.runtime.parallelize import ParallelModel

_PREFIX = "model."


def export_safetensors(checkpoint: Path, target: Path) -> int:
    """Writes the weights of a checkpoint as one safetensors file that the model's ``load_state_dict`` takes.

    Tied parameters are written under each of their names. The whole model has to fit into memory.

    Returns:
        How many tensors were written.

    Raises:
        InputError: the checkpoint is not whole, or the file cannot be written.
    """
    wrong = damage(checkpoint)
    if wrong:
        raise InputError(f"{str(checkpoint)!r} is no whole checkpoint: {wrong}", "Give a folder step-NNNNNNNN")
    state = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in _stored(checkpoint).items()}
    dcp.load({_PREFIX + name: tensor for name, tensor in state.items()}, checkpoint_id=str(checkpoint), no_dist=True)
    for name, others in settings(checkpoint).get("tied", {}).items():
        state.update({other: state[name].clone() for other in others if name in state})
    with replacing(target, InputError) as aside:
        save_file(state, aside, metadata={"format": "pt"})
    return len(state)


def load_weights(model: ParallelModel, path: Path) -> None:
    """Gives a model the weights of a checkpoint or a safetensors file; the optimizer begins anew.

    Every process must call it, and reads the tensors of its own pipeline stages only.

    Raises:
        InputError: the file or folder is missing or damaged, or lacks a tensor or has it in another shape.
    """
    if path.is_dir():
        _load_checkpoint(model, path)
    else:
        try:
            with safe_open(path, framework="pt") as file:
                _load_file(model, file, str(path))
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"--weights {str(path)!r} cannot be read: {error}", "Give a .safetensors file or a checkpoint folder"
            ) from None


def _load_file(model: ParallelModel, file: safe_open, where: str) -> None:
    names, wanted = set(file.keys()), model.state_dict()
    found = {name: next((n for n in (name, *model.graph.tied.get(name, ())) if n in names), None) for name in wanted}
    shapes = {name: tuple(file.get_slice(n).get_shape()) if n else None for name, n in found.items()}
    _check({name: tuple(tensor.shape) for name, tensor in wanted.items()}, shapes, where)
    model.load_state_dict({name: file.get_tensor(n) for name, n in found.items() if n is not None})


def _load_checkpoint(model: ParallelModel, path: Path) -> None:
    wrong = damage(path)
    if wrong:
        raise InputError(f"--weights {str(path)!r} is no whole checkpoint: {wrong}", "Give a folder step-NNNNNNNN")
    stored, wanted = _stored(path), model.state_dict()
    _check(
        {name: tuple(tensor.shape) for name, tensor in wanted.items()},
        {name: tuple(stored[name][0]) if name in stored else None for name in wanted},
        str(path),
    )
    together = torch.distributed.is_initialized()
    dcp.load({_PREFIX + n: t for n, t in wanted.items()}, checkpoint_id=str(path), no_dist=not together)
    model.align_tied()


def _check(wanted: dict[str, tuple[int, ...]], given: dict[str, tuple[int, ...] | None], where: str) -> None:
    for name, shape in wanted.items():
        have = given[name]
        if have != shape:
            raise InputError(f"--weights {where!r} has {name!r} as {have}", f"The model needs it with shape {shape}")


def _stored(checkpoint: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Sizes and dtypes of a checkpoint's model tensors, by parameter name."""
    metadata = FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    return {
        key.removeprefix(_PREFIX): (value.size, value.properties.dtype)
        for key, value in metadata.items()
        if key.startswith(_PREFIX) and isinstance(value, TensorStorageMetadata)
    }
