"""``--profile``: a Chrome trace of a few steps of every process, for chrome://tracing or Perfetto."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from autopar.errors import RunError
from autopar.files import replacing

STEPS = 3


class Tracer:
    """Traces :data:`STEPS` steps after the first two (or the last ones of a shorter run); does nothing without folder.

    Args:
        folder: gets ``rank-N.json``.
        steps: of this run.
    """

    def __init__(self, folder: str | None, rank: int, steps: int) -> None:
        self._profiler: profile | None = None
        if folder is None or steps < 1:
            return
        self._target = Path(folder) / f"rank-{rank}.json"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        active = min(STEPS, steps)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=min(2, steps - active), warmup=0, active=active, repeat=1),
            on_trace_ready=self._write,
        )

    def step(self) -> None:
        """A step has ended."""
        if self._profiler:
            self._profiler.step()

    def __enter__(self) -> Tracer:
        if self._profiler:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler:
            self._profiler.stop()

    def _write(self, finished: profile) -> None:
        with replacing(self._target, RunError) as aside:
            finished.export_chrome_trace(str(aside))
