"""What autocast does to one operator: which operands it narrows or widens, found by a run on fake tensors.

Autocast is by device: its lists for CPU and CUDA differ, and neither touches meta tensors. Fake tensors carry the type
of a device, also of one that this machine lacks, but then know no gradients. So the operator runs twice: here, to see
the casts, and on the meta device with these casts made, to see what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

AUTOCAST: dict[str, torch.dtype | None] = {  # of a plan's precision: the dtype that operators compute in
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # beside the products themselves
}


def casts_of(
    call: Callable[[Sequence[torch.Tensor]], Any], operands: Sequence[torch.Tensor], device: str, dtype: torch.dtype
) -> tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]:
    """The dtypes that autocast gives the operands, and those of the results.

    Args:
        call: runs the operator on these operands.
        operands: on the meta device.
        device: type of the device that the operator would run on.
        dtype: of autocast.
    """
    dtypes = [operand.dtype for operand in operands]
    with torch.no_grad(), FakeTensorMode():
        fakes = [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=device) for v in operands]
        home = {v.untyped_storage()._cdata: i for i, v in enumerate(fakes)}
        with _Casts(home, dtypes), _autocast(device, dtype):
            result = call(fakes)
    return tuple(dtypes), tuple(v.dtype for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor))


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the dtype that each operand, or a view of it, is turned into."""

    def __init__(self, home: dict[int, int], dtypes: list[torch.dtype]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._home, self._dtypes = home, dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            operand = self._home.get(args[0].untyped_storage()._cdata)
            if operand is not None:
                self._dtypes[operand] = result.dtype
        return result


@contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """``torch.autocast`` without its refusal where the device is missing."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
