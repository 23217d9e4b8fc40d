"""Times one operator, forward and backward, on the device of this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopar.hardware.profiles import MeasuredOperator
from autopar.profiler.tasks import Fill, Operand, OperatorTask

MIN_SAMPLES = 3
MAX_SAMPLES = 200
SPREAD_BYTES = 16 * 2**20  # operands are taken in turn from sets that together exceed the inner caches, as in a step
MAX_SETS = 8
BATCH_S = 2e-4  # calls shorter than this are timed several at a time


def resolve(name: str) -> Callable[..., Any]:
    """The ATen overload of a name such as ``aten.linear.default``."""
    space, op, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), op), overload)
    return found


def make_operand(fill: Fill, device: torch.device) -> torch.Tensor:
    """A tensor of the local shape, memory order and kind that a task wants."""
    meta, order = fill.meta, fill.order
    permuted = [meta.shape[d] for d in order]
    if meta.dtype.is_floating_point:
        tensor = torch.randn(permuted, dtype=torch.float32, device=device).mul_(0.1).to(meta.dtype)
    elif meta.dtype == torch.bool:
        tensor = torch.ones(permuted, dtype=torch.bool, device=device)
    else:
        tensor = torch.randint(0, max(1, fill.below), permuted, dtype=meta.dtype, device=device)
    back = [order.index(d) for d in range(len(order))]
    return tensor.permute(back).requires_grad_(fill.needs_grad)


class Bound:
    """A task with one set of operands made, ready to be called."""

    def __init__(self, task: OperatorTask, device: torch.device) -> None:
        self.operands = [make_operand(fill, device) for fill in task.operands]
        self.wanted = [t for t in self.operands if t.requires_grad]
        self.call = resolve(task.target)

        def bind(value: Any) -> Any:
            if isinstance(value, Operand):
                return self.operands[value.index]
            return device if isinstance(value, torch.device) else value

        self.args, self.kwargs = pytree.tree_map(bind, (task.args, task.kwargs))

    def forward(self) -> Any:
        return self.call(*self.args, **self.kwargs)

    @staticmethod
    def differentiable(result: Any) -> list[torch.Tensor]:
        """The results that carry gradient."""
        return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]


def clock(device: torch.device) -> float:
    """Seconds, once everything issued so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(
    task: OperatorTask,
    device: torch.device,
    window_s: float,
    engine_s: float = 0.0,
    together: Callable[[], None] | None = None,
) -> MeasuredOperator:
    """Forward and backward time of one operator, the lower quartile of many calls.

    Args:
        task: what to call.
        device: where.
        window_s: time to spend; at least three samples are taken.
        engine_s: cost of one call into autograd, taken off every backward time (in training one call runs them all).
        together: waits for the other processes, so that all measure the same operator at the same time.
    """
    bound = Bound(task, device)
    others = max(0, min(MAX_SETS, round(SPREAD_BYTES / max(1, sum(m.nbytes for m in task.inputs)))) - 1)
    bounds = itertools.cycle([bound, *(Bound(task, device) for _ in range(others))])
    start = clock(device)
    result = bound.forward()
    outputs = Bound.differentiable(result) if bound.wanted else []
    gradients = [torch.randn_like(t) for t in outputs]
    if outputs:
        torch.autograd.grad(outputs, bound.wanted, gradients, allow_unused=True)
    once = clock(device) - start
    repeats = max(1, min(50, int(BATCH_S / max(once, 1e-7))))
    if together:
        together()
    forward: list[float] = []
    backward: list[float] = []
    end = time.perf_counter() + window_s
    while len(forward) < MIN_SAMPLES or (time.perf_counter() < end and len(forward) < MAX_SAMPLES):
        turn = list(itertools.islice(bounds, repeats))
        begun = clock(device)
        kept = [one.forward() for one in turn]
        forward.append((clock(device) - begun) / repeats)
        if outputs:
            results = [(Bound.differentiable(made), one.wanted) for made, one in zip(kept, turn, strict=True)]
            begun = clock(device)
            for made, wanted in results:
                torch.autograd.grad(made, wanted, gradients, allow_unused=True)
            backward.append((clock(device) - begun) / repeats)
            del results, made, wanted
        del kept
    return MeasuredOperator(
        op=task.op,
        inputs=task.inputs,
        outputs=task.outputs,
        attributes=task.attributes,
        forward_s=undisturbed(forward),
        backward_s=max(undisturbed(backward) - engine_s, 0.0) if backward else None,
        forward_flops=task.forward_flops,
        backward_flops=task.backward_flops,
        peak_bytes=_result_bytes(result),
        samples=len(forward),
    )


def undisturbed(samples: list[float]) -> float:
    """The lower quartile: other programs on the machine only ever add time, and a median moves with them."""
    return quantiles(samples, n=4, method="inclusive")[0]


def _result_bytes(result: Any) -> int:
    """Bytes of the results that do not share memory with each other."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in pytree.tree_leaves(result)
        if isinstance(t, torch.Tensor)
    }
    return sum(storages.values())


def engine_call_time(device: torch.device, samples: int = 200) -> float:
    """Seconds of one call into autograd that computes next to nothing."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    gradient = torch.ones(1, device=device)
    times = []
    for _ in range(samples):
        out = leaf.view(1)
        begun = clock(device)
        torch.autograd.grad(out, leaf, gradient)
        times.append(clock(device) - begun)
    return median(times)
