"""Pipelines whose compute is sleep: torch's schedules as they run on gloo, with passes of known length.

Sleeping processes do not compete for processors, so a schedule of eight stages can be timed on two cores.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from autopar.cost.schedules import stages_of_rank
from autopar.cost.timeline import StageTime
from autopar.runtime.pipeline import make_schedule
from tests.processes import spawn

WIDTH = 4


def _sleep(seconds: float) -> None:
    """Sleeps to a deadline: what the caller spends on the way counts as sleep, a late wake-up is made short."""
    deadline = time.monotonic() + seconds
    if seconds > 1e-3:
        time.sleep(seconds - 5e-4)
    while time.monotonic() < deadline:
        pass


class _Pass(torch.autograd.Function):
    """Identity whose forward and backward take so long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        _sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        _sleep(ctx.backward_s)
        return grad.contiguous(), None, None


class SleepingStage(nn.Module):
    """Adds its weight to its input; gradients of the two are apart, as those of a product are."""

    def __init__(self, times: StageTime, first: bool, last: bool) -> None:
        super().__init__()
        self.last = last  # gives the loss
        self.weight = nn.Parameter(torch.zeros(1, WIDTH))
        self.forward_s = times.forward_s
        # nothing before the first stage wants a gradient: all its backward is for weights
        self.weight_s = times.backward_s if first else times.weight_s
        self.input_s = times.backward_s - self.weight_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = _Pass.apply(x, self.forward_s, self.input_s)
        result = added + _Pass.apply(self.weight, 0.0, self.weight_s)
        return result.sum() if self.last else result


def _run(schedule: str, virtual: int, micro_batches: int, times: list[StageTime], repeats: int, output: str) -> None:
    """One process: steps through the schedule; the first writes the seconds of the steps."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = stages_of_rank(schedule, rank, ranks, virtual)
    example, device, count = torch.zeros(1, WIDTH, requires_grad=True), torch.device("cpu"), len(times)
    stages = []
    for i in held:
        module, made = SleepingStage(times[i], i == 0, i == count - 1), example.sum() if i == count - 1 else example
        stages.append(PipelineStage(module, i, count, device, input_args=example, output_args=made))
    pipeline = make_schedule(schedule, stages, micro_batches)
    batch, weights = torch.zeros(micro_batches, WIDTH), torch.ones(micro_batches, WIDTH)
    spans: list[float] = []
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.monotonic()
        target = {"target": weights} if count - 1 in held else {}
        pipeline.step(*([batch] if 0 in held else []), return_outputs=False, **target)
        ends: list[Any] = [None] * ranks
        dist.all_gather_object(ends, (begun, time.monotonic()))
        spans.append(max(end for _, end in ends) - min(start for start, _ in ends))
    if rank == 0:
        Path(output).write_text(json.dumps(spans[1:]))


def measure(
    schedule: str, ranks: int, virtual: int, micro_batches: int, times: Sequence[StageTime], repeats: int = 3
) -> float:
    """Seconds of a step of real processes: the median over some steps, one to warm up apart."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "spans"
        spawn(ranks, _run, schedule, virtual, micro_batches, list(times), repeats, str(output))
        return median(json.loads(output.read_text()))


def sleeping_stages(count: int, equal: bool, send_s: float) -> list[StageTime]:
    """Stages of 60 ms forward and 120 ms backward, or of up to twice that."""
    scales = [1.0 if equal else 1 + (3 * i % 4) / 3 for i in range(count)]
    return [StageTime(0.06 * x, 0.12 * x, send_s, 0.06 * x) for x in scales]


def hop_s(ranks: int) -> float:
    """Seconds that torch and gloo add between the passes of two stages: one micro-batch through passes of no length,
    there and back."""
    return measure("gpipe", ranks, 1, 1, [StageTime(0.0, 0.0)] * ranks) / (2 * ranks - 1)
