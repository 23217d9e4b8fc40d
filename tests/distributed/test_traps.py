"""What usually goes wrong, against one process: ignored labels, micro-batches without any, clipping, tied and frozen
parameters, buffers, parameter groups, every schedule, compiled blocks, bf16."""

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

TIED = str(Path(__file__).with_name("tied_gpt.py"))
STEPS, GLOBAL_BATCH, CLIP = 4, 8, 0.5
Case = tuple[dict[str, int], dict[str, Any]]

MESHES: list[Case] = [
    ({"dp_replicate": 4}, {}),
    ({"dp_shard": 4}, {}),
    ({"tp": 4}, {"sequence_sharded": True}),
    ({"pp": 4}, {}),
    ({"pp": 2, "tp": 2}, {}),
    ({"dp_shard": 2, "tp": 2}, {"recompute": "full"}),
    ({"dp_replicate": 2, "dp_shard": 2}, {}),
]
SCHEDULES: list[Case] = [
    ({data: 2, "pp": 2}, {"schedule": schedule, "virtual_stages": virtual})
    for data in ("dp_replicate", "dp_shard")
    for schedule, virtual in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv", 2),
        ("dualpipev", 2),
    )
]
COMPILED: list[Case] = [
    ({"dp_shard": 4}, {"compile": "aot_eager"}),
    ({"pp": 2, "tp": 2}, {"compile": "aot_eager"}),
]
NARROW: list[Case] = [
    ({"dp_shard": 4}, {"precision": "bf16"}),
    ({"pp": 2, "tp": 2}, {"precision": "bf16"}),
    ({"dp_shard": 2, "pp": 2}, {"precision": "bf16", "schedule": "zbv", "virtual_stages": 2}),
]


def compare(reference: Reference, cases: list[Case], tolerance: float, moved: float) -> None:
    job = load(TIED)
    graph = capture(job, 1)
    batch = job.example_batch(GLOBAL_BATCH)
    for mesh, more in cases:
        shards = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        model = parallelize(job, make_plan(graph, mesh, 1, GLOBAL_BATCH // shards, **more))
        model.max_grad_norm = CLIP
        case = f"{mesh} {more}"
        for step in range(STEPS):
            loss = float(model.step(batch))
            assert loss == pytest.approx(reference.losses[step], rel=tolerance), f"{case}: loss of step {step}"
            assert model.grad_norm == pytest.approx(reference.norms[step], rel=tolerance), f"{case}: norm, step {step}"
        whole = model.full_state_dict()
        assert whole.keys() == reference.parameters.keys(), case
        for name, want in reference.parameters.items():
            torch.testing.assert_close(
                whole[name], want, rtol=0, atol=moved, msg=lambda m, c=case, n=name: f"{c} {n}: {m}"
            )


@pytest.mark.parametrize("cases", [MESHES, SCHEDULES, COMPILED], ids=["meshes", "schedules", "compiled"])
def test_fp32_equals_one_process(cases: list[Case]) -> None:
    """AdamW divides a gradient by its own size, so rounding shows most where a gradient is near zero: 0.1 steps."""
    job = load(TIED)
    batches = [job.example_batch(GLOBAL_BATCH)] * STEPS
    spawn(4, compare, single_process(job, batches, clip=CLIP), cases, 1e-4, 1e-4)


def test_bf16_stays_near_one_process_in_fp32() -> None:
    """Loss and norm within 1%; no parameter is further off than the steps could carry it."""
    job = load(TIED)
    batches = [job.example_batch(GLOBAL_BATCH)] * STEPS
    spawn(4, compare, single_process(job, batches, clip=CLIP), NARROW, 1e-2, 2.5 * STEPS * 1e-3)
