"""A search with its capturing timed apart; CPU time, so that a busy machine counts less."""

from __future__ import annotations

import time
from typing import Any

from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob
from autopar.planner import planner
from autopar.planner.planner import SearchResult


def timed_search(
    job: TrainingJob, cluster: Cluster, batch: int, precision: str, **settings: Any
) -> tuple[SearchResult, float, float]:
    """The result, and the CPU seconds of capturing and of all else.

    Args:
        settings: further arguments of :func:`autopar.planner.planner.search`.
    """
    capturing = 0.0

    def counted(*args: Any) -> OpGraph:
        nonlocal capturing
        started = time.process_time()
        graph = capture(*args)
        capturing += time.process_time() - started
        return graph

    original, planner.capture = planner.capture, counted
    started = time.process_time()
    try:
        found = planner.search(job, cluster, batch, precision, **settings)
    finally:
        planner.capture = original
    return found, capturing, time.process_time() - started - capturing
