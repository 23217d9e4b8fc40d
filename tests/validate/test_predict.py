"""Layouts and repeated layers of measured runs."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.cost.engine import Engine
from autopar.model.capture import capture
from autopar.plan import Mesh
from autopar.validate.layouts import tensor_parallel_layout
from autopar.validate.models import Shape, job_of
from autopar.validate.predict import DTYPES, Predictor, cluster_of, deepen
from autopar.validate.rows import Row
from autopar.validate.trainers import trainer_of


def row(**changes: object) -> Row:
    base: dict[str, object] = {
        "id": "x-1", "family": "llama", "layers": 5, "hidden": 256, "ffn": 512, "heads": 8, "kv_heads": 4,
        "vocab": 1024, "seq_len": 128, "gpu": "h100-sxm", "gpus": 8, "gpus_per_node": 8, "intra_node": "nvlink4",
        "precision": "bf16", "dp": 8, "zero_stage": 1, "tp": 1, "pp": 1, "micro_batch": 2, "global_batch": 32,
        "recompute": "none", "flash_attention": 1,
    }  # fmt: skip
    return Row.model_validate({**base, **changes})


def graph_of(run: Row, layers: int):
    return capture(job_of(Shape(run, layers, run.seq_len, 0, DTYPES[run.precision])), run.micro_batch or 1)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_communicate_as_megatron_does(family: str, sequence: bool) -> None:
    """Two all-reduces a direction; with sequence parallelism gathers into the products and scatters out of them."""
    run = row(family=family, dp=2, tp=4)
    graph, mesh = graph_of(run, 3), Mesh(dp_shard=2, tp=4)
    block = next(b for b in graph.blocks if b.name == "blocks.1")
    layout = tensor_parallel_layout(graph, block, 4, sequence)
    engine = Engine(lambda n: graph, cluster_of(run), "bf16", trainer_of(run))
    found = Counter((c.kind, c.direction) for c in engine.block_cost(graph, block, layout, mesh).collectives)
    if sequence:
        expected = {(k, d): 2 for k in ("all_gather", "reduce_scatter") for d in ("forward", "backward")}
    else:
        expected = {("all_reduce", d): 2 for d in ("forward", "backward")}
    assert found == expected


def test_repeated_layers_cost_and_hold_what_captured_ones_do() -> None:
    run = row()
    grown, whole = deepen(graph_of(run, 3), 2), graph_of(run, 5)
    assert grown.parameter_count == whole.parameter_count
    assert grown.forward_flops == whole.forward_flops
    predictor = Predictor()
    results = []
    for graph in (grown, whole):
        engine = Engine(lambda n, g=graph: g, cluster_of(run), "bf16", trainer_of(run))
        predictor._engine = lambda r, e=engine: e  # type: ignore[method-assign, misc]
        results.append(predictor.predict(run))
    assert results[0].step_time_s == pytest.approx(results[1].step_time_s, rel=1e-12)
    assert results[0].peak_allocated == results[1].peak_allocated


def test_more_bandwidth_is_never_slower() -> None:
    times = [
        Predictor().predict(row(gpus=16, dp=16, inter_node_gbps_per_gpu=rate)).step_time_s for rate in (25, 100, 400)
    ]
    assert times == sorted(times, reverse=True)


def test_recomputation_trades_memory_for_time() -> None:
    kept, again = (Predictor().predict(row(recompute=r)) for r in ("none", "full"))
    assert again.step_time_s > kept.step_time_s
    assert again.peak_allocated < kept.peak_allocated


def test_smaller_last_micro_batch_is_counted() -> None:
    """11 samples a device in micro-batches of 4: two of 4 and one of 3."""
    uneven = Predictor().predict(row(micro_batch=4, global_batch=88))
    less, more = (Predictor().predict(row(micro_batch=4, global_batch=n)) for n in (64, 96))
    assert less.step_time_s < uneven.step_time_s < more.step_time_s
