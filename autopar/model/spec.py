"""TrainingJob: what is trained, read from a ``model.py`` file or a Hugging Face ``config.json``."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import ModelError

Batch = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class TrainingJob:
    """A model with its example data, loss and optimizer.

    Attributes:
        source: what :func:`load` was given, with an absolute path.
        name: a short name for tables.
        build_model: makes a fresh module; allocates nothing under ``torch.device("meta")``.
        example_batch: batch size -> dict or tuple of tensors with the samples in dimension 0, and of settings
            (numbers, flags, text) that are the same in every batch.
        compute_loss: (output, batch) -> scalar loss, the mean over the batch.
        build_optimizer: parameters -> optimizer.
        build_dataset: split name -> map-style dataset, or None.
    """

    source: str
    name: str
    build_model: Callable[[], nn.Module]
    example_batch: Callable[[int], Batch]
    compute_loss: Callable[[Any, Batch], torch.Tensor]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    build_dataset: Callable[[str], Any] | None = None

    def flatten_batch(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The tensors of a batch by name; a tuple's are named by position (``arg0``)."""
        return {key: value for key, value in by_name(batch).items() if isinstance(value, torch.Tensor)}

    def loss_module(self) -> LossModule:
        """A fresh model with its loss: batch tensors by name in, scalar loss out."""
        return LossModule(self.build_model(), self, self.example_batch(2))


def by_name(batch: Batch) -> dict[str, Any]:
    """The values of a batch by name; a tuple's are named by position (``arg0``)."""
    return dict(batch) if isinstance(batch, dict) else {f"arg{i}": value for i, value in enumerate(batch)}


def settings_of(batch: Batch) -> dict[str, Any]:
    """The values of a batch that are no tensors: numbers, flags, text; the same in every batch."""
    return {key: value for key, value in by_name(batch).items() if not isinstance(value, torch.Tensor)}


class LossModule(nn.Module):
    """The user's model and loss as one module; what is captured and what one process would train.

    Args:
        model: the user's.
        job: for its loss.
        example: a batch; says in which form the model takes one, and its settings.
    """

    def __init__(self, model: nn.Module, job: TrainingJob, example: Batch) -> None:
        super().__init__()
        self.model, self._job, self._keyed = model, job, isinstance(example, dict)
        self._settings, self._order = settings_of(example), tuple(by_name(example))
        accepted = inspect.signature(model.forward).parameters
        self._any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        self._accepted = set(accepted)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        """Scalar loss of the batch."""
        whole = {key: batch[key] if key in batch else self._settings[key] for key in self._order}
        if self._keyed:
            output = self.model(**{k: v for k, v in whole.items() if self._any or k in self._accepted})
            return self._job.compute_loss(output, whole)
        values = tuple(whole.values())
        positional = [
            p
            for p in inspect.signature(self.model.forward).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        ]
        takes_all = any(p.kind is p.VAR_POSITIONAL for p in positional)
        return self._job.compute_loss(self.model(*values[: None if takes_all else len(positional)]), values)


def load(source: str) -> TrainingJob:
    """Loads a model.

    Args:
        source: path of a ``model.py``, or ``hf:PATH`` of a directory or file with a Hugging Face ``config.json``.

    Raises:
        ModelError: the file is missing, fails, or lacks ``build_model`` or ``example_batch``.
    """
    if source.startswith("hf:"):
        from autopar.model.huggingface import load_config

        return load_config(source.removeprefix("hf:"))
    path = Path(source)
    if not path.is_file():
        raise ModelError(f"model file {source!r} does not exist", "Write one with 'autopar init model.py'")
    if path.suffix != ".py":
        raise ModelError(f"model file {source!r} is no Python file", "Give a model.py, or hf:PATH for a config.json")
    module = _import(path)
    for required in ("build_model", "example_batch"):
        if not callable(getattr(module, required, None)):
            raise ModelError(f"{source} does not define {required}()", "See 'autopar init' for a file that does")
    guarded = {name: _guard(getattr(module, name, None), name, path) for name in OPTIONAL + REQUIRED}
    job = TrainingJob(
        source=str(path.resolve()),
        name=path.stem,
        build_model=guarded["build_model"],
        example_batch=guarded["example_batch"],
        compute_loss=guarded["compute_loss"] or default_loss,
        build_optimizer=guarded["build_optimizer"] or default_optimizer,
        build_dataset=guarded["build_dataset"],
    )
    _check_batch(job)
    return job


REQUIRED = ("build_model", "example_batch")
OPTIONAL = ("compute_loss", "build_optimizer", "build_dataset")


def default_loss(output: Any, batch: Batch) -> torch.Tensor:
    """``output.loss``, or the output itself where it is a scalar.

    Raises:
        ModelError: it is neither.
    """
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ModelError(
            f"the model gives {shown}, not a scalar loss", "Define compute_loss(output, batch) in model.py"
        )
    return loss


def default_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with a learning rate of 3e-4 and torch's other defaults."""
    return torch.optim.AdamW(parameters, lr=3e-4)


def _import(path: Path) -> ModuleType:
    """Runs a model.py as a module of its own, found again by worker processes through its path."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"autopar_user_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # so that model.py may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ModelError(f"{path}, line {error.lineno}: {error.msg}", "Mend the file") from None
    except Exception as error:
        raise ModelError(f"{path} fails on import: {describe(error, path)}", "Mend the file") from error
    finally:
        sys.path.remove(folder)
    return module


def _guard(function: Any, name: str, path: Path) -> Any:
    """The user's function, whose own errors become a ModelError with their line."""
    if function is None:
        return None

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ModelError:
            raise
        except Exception as error:
            if name == "compute_loss":
                raise  # capture reports it with the module path
            raise ModelError(f"{name}() of {path} raised {describe(error, path)}", f"Mend {name}()") from error

    guarded.__name__ = name
    return guarded


def describe(error: BaseException, path: Path) -> str:
    """An error with the last line of the user's file that it passed through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
    where = f" (line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _check_batch(job: TrainingJob) -> None:
    batch = job.example_batch(2)
    if not isinstance(batch, dict | tuple):
        raise ModelError(f"example_batch(2) gives {type(batch).__name__}", "Return a dict or a tuple of tensors")
    tensors, settings = job.flatten_batch(batch), settings_of(batch)
    other = job.example_batch(3)
    for key, value in settings.items():
        if not isinstance(value, bool | int | float | str | None):
            raise ModelError(
                f"example_batch gives {key!r} as {type(value).__name__}",
                "Give tensors, or settings (numbers, flags, text) that are the same in every batch",
            )
        if by_name(other).get(key) != value:
            raise ModelError(
                f"example_batch(2) gives {key}={value!r} and example_batch(3) {key}={by_name(other).get(key)!r}",
                "Give what changes from batch to batch as a tensor with the samples in dimension 0",
            )
    if not tensors:
        raise ModelError("example_batch(2) holds no tensor", "Return at least one tensor")
    for key, tensor in tensors.items():
        sizes = [tuple(t.shape) for t in (tensor, job.flatten_batch(other)[key])]
        if [size[:1] for size in sizes] != [(2,), (3,)]:
            raise ModelError(
                f"example_batch(2) gives {key!r} in the shape {sizes[0]}, example_batch(3) in {sizes[1]}",
                "Give every tensor with the samples in dimension 0",
            )
