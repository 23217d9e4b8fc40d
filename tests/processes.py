"""Real gloo process groups for tests: spawned, timed out and reaped."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _entry(rank: int, store: str, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=world, init_method=f"file://{store}", timeout=timedelta(seconds=60)
    )
    try:
        function(*args)
    finally:
        gc.collect()  # models in reference cycles hold tensors and subgroups
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread that frees a tensor while Python finalizes aborts the process (pytorch/pytorch#179291).
    os._exit(0)


def spawn(world: int, function: Callable[..., Any], *args: Any) -> None:
    """Runs ``function(*args)`` in ``world`` processes of one gloo group; a failure in any is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_entry, (str(Path(folder) / "store"), world, function, args), nprocs=world, join=True)
