"""Four real processes under every mesh train as one process does: every loss, every norm, the final parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.model.capture import capture
from autopar.model.spec import load
from autopar.runtime.parallelize import parallelize
from tests.distributed.plans import make_plan
from tests.distributed.reference import Reference, single_process
from tests.processes import spawn

GPT = str(Path(__file__).parents[2] / "autopar/zoo/gpt.py")
STEPS, GLOBAL_BATCH = 10, 8

CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp_replicate": 4}, {}),
    ({"dp_shard": 4}, {}),
    ({"tp": 4}, {}),
    ({"tp": 4}, {"sequence_sharded": True}),
    ({"pp": 4}, {"schedule": "1f1b"}),
    ({"pp": 4}, {"schedule": "gpipe"}),
    ({"dp_replicate": 2, "tp": 2}, {}),
    ({"dp_replicate": 2, "pp": 2}, {"schedule": "1f1b"}),
    ({"dp_replicate": 2, "pp": 2}, {"schedule": "gpipe"}),
    ({"tp": 2, "pp": 2}, {"schedule": "1f1b", "sequence_sharded": True}),
    ({"tp": 2, "pp": 2}, {"schedule": "gpipe"}),
    ({"dp_shard": 2, "tp": 2}, {}),
    ({"dp_replicate": 2, "dp_shard": 2}, {}),
    ({"dp_replicate": 2, "tp": 2}, {"recompute": "full"}),
    ({"dp_shard": 2, "pp": 2}, {"recompute": "full"}),
]


def compare(reference: Reference) -> None:
    job = load(GPT)
    graph = capture(job, 1)
    batch = job.example_batch(GLOBAL_BATCH)
    for mesh, more in CASES:
        shards = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        model = parallelize(job, make_plan(graph, mesh, 1, GLOBAL_BATCH // shards, **more))
        case = f"{mesh} {more}"
        for step in range(STEPS):
            loss = float(model.step(batch))
            assert loss == pytest.approx(reference.losses[step], rel=1e-4), f"{case}: loss of step {step}"
            assert model.grad_norm == pytest.approx(reference.norms[step], rel=1e-4), f"{case}: norm of step {step}"
        whole = model.full_state_dict()
        assert whole.keys() == reference.parameters.keys(), case
        for name, want in reference.parameters.items():
            torch.testing.assert_close(
                whole[name], want, rtol=1e-4, atol=2e-5, msg=lambda m, c=case, n=name: f"{c} {n}: {m}"
            )
        dist.barrier()


def test_every_mesh_and_schedule_equals_one_process() -> None:
    job = load(GPT)
    spawn(4, compare, single_process(job, [job.example_batch(GLOBAL_BATCH)] * STEPS))
