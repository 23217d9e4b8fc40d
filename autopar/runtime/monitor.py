"""What a run says of itself beside the loss: where a step's time goes, memory, and which process lags."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from autopar.units import GIB

LAGS = 1.3  # a process lags when its own work takes so much longer than the other processes' median


class StepClock:
    """Splits a step into its parts by the host's clock.

    On a GPU a part ends where the host waits for the device: after the loss and after the gradient norm. What the
    optimizer leaves running there is counted with the next step's forward pass.
    """

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """The time since the last mark belongs to ``part``."""
        now = time.perf_counter()
        self.parts[part], self._last = now - self._last, now


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has had: allocated on its GPU, or resident on the host where it computes there."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, kibibytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def lagging(work_s: Sequence[float]) -> int | None:
    """The process whose own work (waiting for data and computing, not waiting for others) takes clearly longest.

    Args:
        work_s: of each process in the same step, seconds.
    """
    if len(work_s) < 2:
        return None
    slowest = max(range(len(work_s)), key=lambda rank: work_s[rank])
    others = statistics.median(work for rank, work in enumerate(work_s) if rank != slowest)
    return slowest if others > 0 and work_s[slowest] > LAGS * others else None
