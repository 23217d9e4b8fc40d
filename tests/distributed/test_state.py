"""Batch norms by the stated rule, and models of which most is frozen, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.runtime.parallelize import parallelize
from tests.distributed.plans import make_plan
from tests.distributed.reference import Reference, single_process
from tests.processes import spawn

NORMS = str(Path(__file__).with_name("batch_norm_net.py"))
LORA = str(Path(__file__).parents[1] / "model/programs/lora.py")
STEPS, BATCH, MICRO = 3, 16, 4
Case = tuple[dict[str, int], dict[str, Any]]
CASES: list[Case] = [
    ({"dp_replicate": 2}, {}),
    ({"dp_shard": 2}, {}),
    ({"dp_replicate": 2}, {"recompute": "full"}),
    ({"dp_shard": 2}, {"compile": "aot_eager"}),
    ({"pp": 2}, {}),
    ({"pp": 2}, {"recompute": "full"}),
]


def norms_by_rule(shards: int) -> Reference:
    """One process: every data shard runs its micro-batches from the step's statistics; the shards' are averaged."""
    job = load(NORMS)
    torch.manual_seed(0)
    module = job.loss_module()
    optimizer = job.build_optimizer(module.parameters())
    batch = job.flatten_batch(job.example_batch(BATCH))
    losses = []
    for _ in range(STEPS):
        before = {n: b.clone() for n, b in module.named_buffers()}
        after: list[dict[str, torch.Tensor]] = []
        optimizer.zero_grad()
        total = 0.0
        for shard in range(shards):
            for name, buffer in module.named_buffers():
                buffer.data.copy_(before[name])
            count = BATCH // shards // MICRO
            for piece in range(count):
                begin = (shard * count + piece) * MICRO
                loss = module(**{k: v[begin : begin + MICRO] for k, v in batch.items()}) / (count * shards)
                loss.backward()
                total += loss.item()
            after.append({n: b.clone() for n, b in module.named_buffers()})
        for name, buffer in module.named_buffers():
            mean = torch.stack([one[name].double() for one in after]).mean(0)
            buffer.data.copy_(mean.to(buffer.dtype))
        optimizer.step()
        losses.append(total)
    return Reference(losses, [], {k: v.detach().clone() for k, v in module.model.state_dict().items()})


def compare(source: str, references: dict[int, Reference]) -> None:
    job = load(source)
    graph = capture(job, MICRO)
    batch = job.example_batch(BATCH)
    for mesh, more in CASES:
        shards = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        model = parallelize(job, make_plan(graph, mesh, MICRO, BATCH // MICRO // shards, **more))
        losses = [float(model.step(batch)) for _ in range(STEPS)]
        want = references[shards]
        assert losses == pytest.approx(want.losses, rel=1e-5), f"{mesh} {more}"
        whole = model.full_state_dict()
        assert whole.keys() == want.parameters.keys()
        for name, tensor in want.parameters.items():
            torch.testing.assert_close(
                whole[name], tensor, rtol=1e-4, atol=2e-5, msg=lambda m, n=name, c=(mesh, more): f"{c} {n}: {m}"
            )


def test_batch_norms_follow_the_rule() -> None:
    spawn(2, compare, NORMS, {1: norms_by_rule(1), 2: norms_by_rule(2)})


def test_low_rank_adapters_train_and_the_rest_stays() -> None:
    job = load(LORA)
    torch.manual_seed(0)
    before = {k: v.clone() for k, v in job.loss_module().model.state_dict().items()}
    one = single_process(job, [job.example_batch(BATCH)] * STEPS)
    moved = {k for k, v in one.parameters.items() if not torch.equal(v, before[k])}
    assert moved
    assert all(".down." in k or ".up." in k for k in moved)
    spawn(2, compare, LORA, {1: one, 2: one})
