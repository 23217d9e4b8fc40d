"""What each of the two processes of bench_local.py does: trains plans, times collectives."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from autopar.hardware.profiles import MeasuredCollective
from autopar.model.spec import Batch, load
from autopar.plan import Plan
from autopar.profiler.collectives import measure_collectives
from autopar.runtime.parallelize import ParallelModel, parallelize

WARM_UP_STEPS = 3
BURST_S, LEAST_STEPS, BURSTS = 1.5, 8, 6
QUIET = 0.03  # share of the processors that others may take


@dataclass(frozen=True)
class Measured:
    """One trained plan.

    Attributes:
        plan: as text.
        step_s: median over a burst of steps of the time until the last process has ended its step.
        spread: (third quartile - first) / median of the step times.
        others: share of the processors that other programs took meanwhile.
        loss: of the last step.
    """

    plan: str
    step_s: float
    spread: float
    others: float
    loss: float


def train(source: str, path: str, name: str) -> Measured:
    """Trains a plan for a few bursts of steps; gives the least disturbed one.

    Args:
        source: of the model.
        path: of the plan.
        name: the plan as text.
    """
    job, plan = load(source), Plan.load(path)
    return _least_disturbed(parallelize(job, plan), job.example_batch(plan.global_batch), name)


def _least_disturbed(model: ParallelModel, batch: Batch, name: str) -> Measured:
    for _ in range(WARM_UP_STEPS):
        model.step(batch)
    best: Measured | None = None
    for _ in range(BURSTS):
        one = _burst(model, batch, name)
        best = one if best is None or one.others < best.others else best
        if best.others <= QUIET:
            break
    assert best is not None
    return best


def _burst(model: ParallelModel, batch: Batch, name: str) -> Measured:
    """Steps for a while; every process makes the same number."""
    begun, used = _busy_s(), _own_s()
    start = time.perf_counter()
    times: list[float] = []
    going = torch.ones(1)
    while going > 0:
        dist.barrier()
        step_begun = time.perf_counter()
        model.step(batch)
        times.append(time.perf_counter() - step_begun)
        going[0] = len(times) < LEAST_STEPS or time.perf_counter() - start < BURST_S
        dist.broadcast(going, 0)
    span = time.perf_counter() - start
    total = torch.tensor([_own_s() - used], dtype=torch.float64)
    dist.all_reduce(total)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    first, middle, third = torch.quantile(slowest, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    others = (_busy_s() - begun - float(total)) / (span * (os.cpu_count() or 1))
    agreed = torch.tensor([max(0.0, others)], dtype=torch.float64)
    dist.broadcast(agreed, 0)
    return Measured(name, middle, (third - first) / middle, float(agreed), model.loss)


def _busy_s() -> float:
    """Seconds that all processors have worked for programs, or were taken by the host of a virtual machine."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_s() -> float:
    """Processor seconds of this process."""
    times = os.times()
    return times.user + times.system


def collectives(scope: str) -> list[MeasuredCollective]:
    """Times every collective between the processes."""
    found: list[MeasuredCollective] = []
    measure_collectives(torch.device("cpu"), scope, 0.3, found.append)
    return found
