"""Times collectives between the processes of an initialised process group."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from autopar.hardware.profiles import MeasuredCollective
from autopar.profiler.operators import clock

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
SIZES = tuple(2**e for e in (10, 13, 16, 18, 20, 22, 24, 25))


def group_sizes(processes: int) -> list[int]:
    """Sizes of groups that divide the processes: 2, 4, ... up to all."""
    return [size for size in range(2, processes + 1) if processes % size == 0]


def measure_collectives(
    device: torch.device,
    scope: str,
    window_s: float,
    report: Callable[[MeasuredCollective], None],
    sizes: tuple[int, ...] = SIZES,
) -> None:
    """Times every kind at every message size in groups of every size, all groups at once.

    Args:
        device: where the tensors are.
        scope: name of the link level that joins the processes.
        window_s: time to spend on one point; at least three samples are taken.
        report: called with each result, on every process.
        sizes: bytes of the whole tensor.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in group_sizes(world):
        mine = None
        for first in range(0, world, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= rank < first + size:
                mine = group
        assert mine is not None
        for kind in KINDS:
            for nbytes in sizes:
                seconds = _median_time(_operation(kind, nbytes, size, mine, device), device, window_s)
                if kind == "send":  # timed there and back
                    seconds /= 2
                report(MeasuredCollective(kind, size, scope, nbytes, seconds))


def _operation(
    kind: str, nbytes: int, size: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], object]:
    elements = max(1, nbytes // 4 // size**2) * size**2
    whole = torch.zeros(elements, device=device)
    part = torch.zeros(elements // size, device=device)
    rank = dist.get_rank(group)
    peer = dist.get_global_rank(group, (rank + 1) % size if rank % 2 == 0 else (rank - 1) % size)

    def ping_pong() -> None:
        if size % 2 and rank == size - 1:
            return
        first, second = (dist.send, dist.recv) if rank % 2 == 0 else (dist.recv, dist.send)
        first(whole, peer, group=group)
        second(whole, peer, group=group)

    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if kind == "all_to_all":
        received = torch.empty_like(part)
        return lambda: dist.all_to_all_single(received, part, group=group)
    return ping_pong


def _median_time(call: Callable[[], object], device: torch.device, window_s: float) -> float:
    """Median over calls, mean over processes; every process makes the same number of calls.

    Each call comes after a stretch of compute, as in a step: the processes arrive a little apart, and the threads that
    serve the network have to be woken.
    """
    work = _stretch(device)
    call()
    begun = clock(device)
    work()
    call()
    once = torch.tensor([clock(device) - begun], device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    samples = int(min(40, max(5, window_s / max(float(once), 1e-6))))
    times = []
    for _ in range(samples):
        work()
        begun = clock(device)
        call()
        times.append(clock(device) - begun)
    result = torch.tensor([median(times)], device=device)
    dist.all_reduce(result)
    return float(result) / dist.get_world_size()


def _stretch(device: torch.device) -> Callable[[], object]:
    """About a millisecond of compute on a processor core; on a GPU as many microseconds."""
    a = torch.randn(320, 320, device=device)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)
