"""Dropout: independent between data shards, alike where replicated, different where sharded, repeated on resume."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.runtime.parallelize import ParallelModel, parallelize
from tests.distributed.plans import make_plan
from tests.processes import spawn

NOISY = str(Path(__file__).with_name("noisy_gpt.py"))


def masks(model: ParallelModel) -> dict[str, torch.Tensor]:
    """One step, and the masks it drew, in order."""
    found: dict[str, torch.Tensor] = {}

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.bernoulli_.float:
                found.setdefault(f"{len(found)} {tuple(out.shape)}", out.detach().clone() > 0)
            return out

    with Watch():
        model.step(model.job.example_batch(model.plan.global_batch))
    assert found, "no dropout ran"
    return found


def everywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts: list[torch.Tensor] = [torch.empty(0)] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return parts


def check() -> None:
    job = load(NOISY)
    graph = capture(job, 2)
    for recompute in ("none", "full"):
        model = parallelize(job, make_plan(graph, {"dp_replicate": 2, "tp": 2}, 2, 1, recompute=recompute))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        before = torch.get_rng_state()
        first = masks(model)
        assert torch.equal(torch.get_rng_state(), before), "the user's random numbers moved"
        second = masks(model)
        names = list(first)  # in order: inner (sharded) and outer (replicated) of each block
        sharded, replicated = everywhere(first[names[0]]), everywhere(first[names[1]])
        # ranks: (data shard 0: tp 0, 1), (data shard 1: tp 0, 1)
        assert not torch.equal(sharded[0], sharded[1])
        assert not torch.equal(sharded[0], sharded[2])
        assert torch.equal(replicated[0], replicated[1])
        assert torch.equal(replicated[2], replicated[3])
        assert not torch.equal(replicated[0], replicated[2])
        assert not torch.equal(first[names[0]], second[names[0]]), "two steps drew the same mask"
        assert not torch.equal(first[names[1]], first[names[3]]), "two blocks drew the same mask"
        if recompute == "full":  # recomputed from the last block on
            assert len(names) == 8
            for drawn, again in zip(names[:4], (*names[6:], *names[4:6]), strict=True):
                assert torch.equal(first[drawn], first[again]), "recomputation drew another mask"
        model.load_state_dict(state)
        model.steps_done = 0
        repeated = masks(model)
        assert all(torch.equal(first[n], repeated[n]) for n in names), "a repeated step drew other masks"


def test_dropout_masks() -> None:
    spawn(4, check)
