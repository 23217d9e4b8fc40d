"""Searched plans of zoo models on two processes: loss, norm and every gradient equal one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.hardware.cluster import Cluster
from autopar.model.spec import load
from autopar.plan import Plan
from autopar.planner.planner import search
from autopar.runtime.parallelize import parallelize
from tests.processes import spawn

ZOO = Path(__file__).parents[2] / "autopar/zoo"
MODELS = ["moe", "seq2seq", "vit"]
PINS = [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}]
BATCH = 8


def compare(plans: list[tuple[str, str]]) -> None:
    for source, text in plans:
        job, plan = load(source), Plan.model_validate_json(text)
        batch = job.flatten_batch(job.example_batch(BATCH))
        torch.manual_seed(plan.seed)
        whole = job.loss_module()
        expected = whole(**batch)
        expected.backward()
        want = {name: p.grad for name, p in whole.model.named_parameters() if p.grad is not None}
        scale = max(float(g.abs().max()) for g in want.values())
        model = parallelize(job, plan)
        shard = {k: v.chunk(plan.mesh.dp)[model.topology.data_shard] for k, v in batch.items()}
        loss = model.forward_backward(shard)
        model.reduce_gradients()
        case = f"{Path(source).stem} {plan.mesh.describe()}"
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        for one in model.trained:
            grad = model.as_whole(one.name, one.local_grad) if not model.sharded else one.parameter.grad
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            torch.testing.assert_close(
                grad, want[one.name], rtol=1e-4, atol=1e-5 * scale, msg=lambda m, c=case, n=one.name: f"{c} {n}: {m}"
            )
        dist.barrier()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_searched_plans_equal_one_process(name: str) -> None:
    source = str(ZOO / f"{name}.py")
    cluster = Cluster.load("local-cpu-2")
    plans = [search(load(source), cluster, BATCH, pins=pins, top=1).plans[0] for pins in PINS]
    spawn(2, compare, [(source, plan.model_dump_json()) for plan in plans])
