"""Activations of an estimate against the bytes that autograd keeps when the runtime runs the plan's stage."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

import autopar.zoo.gpt
from autopar.cost.estimate import engine_for
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.spec import TrainingJob, load
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.runtime.parallelize import parallelize
from autopar.runtime.stage import BATCH

ZOO = Path(autopar.zoo.gpt.__file__).parent
PROGRAMS = Path(__file__).parents[1] / "model/programs"
MODELS = [*(ZOO / f"{name}.py" for name in ("gpt", "gpt_tied", "mlp", "moe", "seq2seq", "vit")), PROGRAMS / "unet.py"]


def plan_of(job: TrainingJob, recompute: Literal["none", "full"], precision: Literal["fp32", "bf16"]) -> Plan:
    graph = capture(job, 2)
    return Plan(
        model=ModelRef(source=job.source, fingerprint=graph.fingerprint),
        cluster=ClusterRef(name="local-cpu-2", devices=1),
        global_batch=2,
        mesh=Mesh(),
        stages=[graph.blocks[0].name],
        blocks=[BlockPlan(name=b.name, layout=b.kind, recompute=recompute) for b in graph.blocks],
        layouts={
            kind: Layout(inputs=[{} for _ in blocks[0].inputs], outputs=[{} for _ in blocks[0].outputs])
            for kind, blocks in graph.block_kinds().items()
        },
        micro_batch=2,
        micro_batches=1,
        precision=precision,
        compile="none",
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_activations_are_what_the_runtime_keeps(
    path: Path, recompute: Literal["none", "full"], precision: Literal["fp32", "bf16"]
) -> None:
    job = load(str(path))
    plan = plan_of(job, recompute, precision)
    model = parallelize(job, plan)
    (stage,) = model.stages.values()
    batch = job.flatten_batch(job.example_batch(2))
    held = [*stage.parameters(), *stage.buffers(), *batch.values()]
    apart = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in apart:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(**{f"{BATCH}{key}": value for key, value in batch.items()})
    predicted = engine_for(job, plan, Cluster.load("local-cpu-2")).estimate(plan).stages[0].activations
    assert predicted == sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
