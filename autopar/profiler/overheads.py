"""Times what belongs to no operator: optimizer, gradient accumulation, copies, how processes slow each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median

import psutil
import torch
import torch.distributed as dist

from autopar.hardware.profiles import MeasuredMemory, Overheads
from autopar.profiler.operators import clock

SMALL, LARGE = 2**10, 2**21  # elements: one is all overhead, the other nearly all bytes
BuildOptimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def measure_overheads(device: torch.device, build_optimizer: BuildOptimizer | None = None) -> Overheads:
    """Measures on all processes at once; every process of the group must call it."""
    per_byte, per_tensor = _optimizer(device, build_optimizer or torch.optim.AdamW)
    values = torch.zeros(LARGE, device=device)
    other = torch.ones(LARGE, device=device)
    dist.barrier()
    accumulate = _median(lambda: values.add_(other), device) / (LARGE * 4)
    copy = 2 * LARGE * 4 / _median(lambda: values.copy_(other), device)
    return Overheads(
        optimizer_s_per_byte=per_byte,
        optimizer_s_per_tensor=per_tensor,
        accumulate_s_per_byte=accumulate,
        copy_bandwidth=copy,
        communication_slowdown=_communication_slowdown(device),
        concurrency_slowdown=_concurrency_slowdown(device),
    )


def measure_memory(device: torch.device) -> MeasuredMemory:
    """What this process holds beside tensors, once everything has been loaded and used."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MeasuredMemory(context_bytes=total - free - torch.cuda.memory_reserved(device))
    return MeasuredMemory(context_bytes=psutil.Process().memory_info().rss)


def _median(call: Callable[[], object], device: torch.device, window_s: float = 0.15) -> float:
    call()
    times: list[float] = []
    end = time.perf_counter() + window_s
    while len(times) < 3 or time.perf_counter() < end:
        begun = clock(device)
        call()
        times.append(clock(device) - begun)
    return median(times)


def _optimizer(device: torch.device, build: BuildOptimizer) -> tuple[float, float]:
    """(seconds per byte of parameters, seconds per tensor) of one step: two sizes, one straight line."""

    def step_time(elements: int, tensors: int) -> float:
        parameters = [torch.nn.Parameter(torch.randn(elements, device=device)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = build(parameters)
        dist.barrier()
        return _median(optimizer.step, device) / tensors

    small, large = step_time(SMALL, 32), step_time(LARGE, 4)
    per_byte = max(0.0, (large - small) / ((LARGE - SMALL) * 4))
    return per_byte, max(0.0, small - per_byte * SMALL * 4)


def _work(device: torch.device) -> Callable[[], object]:
    size = 512 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _concurrency_slowdown(device: torch.device) -> float:
    """All processes at work over one process at work."""
    call = _work(device)
    alone = 0.0
    dist.barrier()
    if dist.get_rank() == 0:
        alone = _median(call, device, 0.3)
    dist.barrier()
    together = _median(call, device, 0.3)
    dist.barrier()
    ratio = torch.tensor([together / alone if alone else 0.0], device=device)
    dist.broadcast(ratio, 0)
    return max(1.0, float(ratio))


def _communication_slowdown(device: torch.device) -> float:
    """A stretch of compute with all-reduces in flight over the same stretch without."""
    call = _work(device)
    message = torch.zeros(2**21, device=device)
    once = _median(call, device)
    dist.all_reduce(message)
    begun = clock(device)
    dist.all_reduce(message)
    exchange = torch.tensor([clock(device) - begun, once], device=device)
    dist.all_reduce(exchange, op=dist.ReduceOp.MAX)
    calls = max(4, int(float(exchange[0]) / float(exchange[1])))
    ratios = []
    for _ in range(5):
        begun = clock(device)
        for _ in range(calls):
            call()
        alone = clock(device) - begun
        dist.barrier()
        pending = dist.all_reduce(message, async_op=True)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        ratios.append((clock(device) - begun) / alone)
        assert pending is not None
        pending.wait()
    result = torch.tensor([median(ratios)], device=device)
    dist.all_reduce(result, op=dist.ReduceOp.MAX)
    return max(1.0, float(result))
