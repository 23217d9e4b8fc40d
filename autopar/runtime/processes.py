"""This process's place in a run: joins the process group that torchrun, or autopar's own launcher, describes."""

from __future__ import annotations

import atexit
import gc
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def join(timeout_s: float = 300.0, init_method: str | None = None) -> None:
    """Joins the group that ``RANK`` and ``WORLD_SIZE`` name; does nothing for one process or in a group already.

    NCCL where every process of this machine has a GPU of its own, else gloo.

    Args:
        timeout_s: how long a collective waits for its peers.
        init_method: where the processes meet; None: torchrun's own store.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() or world == 1:
        return
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", str(world))):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    atexit.register(leave)


def leave() -> None:
    """Leaves the group, if in one."""
    if dist.is_initialized():
        gc.collect()  # a gloo thread that frees a tensor while Python finalizes would abort (pytorch#179291)
        dist.destroy_process_group()
