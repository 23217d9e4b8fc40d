"""Records a forward pass on meta tensors, call by call: far cheaper than an export, and it sees every layer.

What export makes of a layer follows from the operators that the layer calls, their settings and the tensors they
read. Layers whose recordings are alike need to be exported once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

UNKNOWN = "unknown "


@dataclass(frozen=True)
class Call:
    """One operator call.

    Attributes:
        text: the operator, whether gradients are recorded and autocast is on, its settings, and the layouts of what it
            reads and makes.
        made: positions of the calls whose results it reads, in order.
        leaves: what else it reads, in order: names of parameters, buffers and inputs, or digests of constants.
    """

    text: str
    made: tuple[int, ...]
    leaves: tuple[str, ...]


@dataclass
class Recording:
    """The calls of one forward pass, and when each module was first entered."""

    calls: list[Call] = field(default_factory=list)
    entered: dict[str, list[int]] = field(default_factory=dict)

    @property
    def known(self) -> bool:
        """Whether every constant that was read has a value."""
        return not any(leaf.startswith(UNKNOWN) for call in self.calls for leaf in call.leaves)

    @classmethod
    def of(
        cls, module: nn.Module, inputs: dict[str, torch.Tensor], name: Callable[[str], str] = lambda n: n
    ) -> Recording:
        """Runs a module once.

        Args:
            module: on the meta device.
            inputs: keyword arguments, on the meta device.
            name: the name that a parameter, buffer or module goes under in the recording.
        """
        recording = cls()
        named = [*module.named_parameters(), *module.named_buffers()]
        leaves = {id(tensor): name(key) for key, tensor in reversed(named)}
        leaves |= {id(tensor): f"input {key}" for key, tensor in inputs.items()}
        with recording._entering(module, name), _Recorder(recording, leaves):
            module(**inputs)
        return recording

    @contextmanager
    def _entering(self, module: nn.Module, name: Callable[[str], str]) -> Iterator[None]:
        paths = {id(child): name(path) for path, child in module.named_modules()}

        def enter(child: nn.Module, _: Any) -> None:
            if id(child) in paths:
                self.entered.setdefault(paths[id(child)], []).append(len(self.calls))

        hook = register_module_forward_pre_hook(enter)
        try:
            yield
        finally:
            hook.remove()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recording: Recording, leaves: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._leaves = recording, leaves
        self._maker: dict[int, tuple[int, int]] = {}
        self._alive: list[Any] = []  # an id is that of one tensor while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made: list[int] = []
        leaves: list[str] = []
        words = [str(func), str(torch.is_grad_enabled()), *(str(torch.is_autocast_enabled(d)) for d in ("cpu", "cuda"))]
        self._read((args, kwargs), words, made, leaves)
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, torch.Tensor) else _tensors_in(result)
        for index, value in enumerate(outputs):
            words.append(_layout(value))
            self._maker[id(value)] = (len(self._recording.calls), index)
        self._alive.append((args, kwargs, outputs))
        self._recording.calls.append(Call(" ".join(words), tuple(made), tuple(leaves)))
        return result

    def _read(self, value: Any, words: list[str], made: list[int], leaves: list[str]) -> None:
        """Adds an argument to a call's text, and to what it reads."""
        if isinstance(value, torch.Tensor):
            if id(value) in self._maker:
                position, index = self._maker[id(value)]
                made.append(position)
                words.append(f"result {index} {_layout(value)}")
            else:
                leaves.append(self._leaves.get(id(value)) or _digest(value))
                words.append(f"leaf {_layout(value)}")
        elif isinstance(value, tuple | list):
            words.append("(")
            for one in value:
                self._read(one, words, made, leaves)
            words.append(")")
        elif isinstance(value, dict):
            for key, one in value.items():
                words.append(f"{key}=")
                self._read(one, words, made, leaves)
        else:
            words.append(repr(value))


def _tensors_in(result: Any) -> list[torch.Tensor]:
    """The tensors among an operator's results, in order."""
    return [value for value in pytree.tree_leaves(result) if isinstance(value, torch.Tensor)]


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.requires_grad}"


def _digest(tensor: torch.Tensor) -> str:
    """Names a constant by its value; one without a value is unlike any other."""
    if tensor.is_meta:
        return f"{UNKNOWN}{id(tensor)}"
    return "constant " + hashlib.sha256(repr((tensor.shape, tensor.dtype, tensor.tolist())).encode()).hexdigest()
