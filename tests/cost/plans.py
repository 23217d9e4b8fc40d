"""Plans to price: of a small transformer, with layouts drawn operator by operator."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import autopar.zoo.gpt
from autopar.cost.engine import Engine
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import Block, OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.sharding.rules import strategies

MESHES = [
    Mesh(tp=2),
    Mesh(tp=4),
    Mesh(dp_replicate=2),
    Mesh(dp_shard=2),
    Mesh(dp_shard=2, tp=2),
    Mesh(dp_replicate=2, dp_shard=2),
    Mesh(pp=2),
    Mesh(pp=2, tp=2),
    Mesh(pp=4),
    Mesh(pp=2, dp_shard=2),
    Mesh(pp=2, dp_replicate=2, tp=2),
]


@cache
def gpt() -> TrainingJob:
    return load(str(Path(autopar.zoo.gpt.__file__)))


@cache
def gpt_at(batch: int) -> OpGraph:
    return capture(gpt(), batch)


@cache
def engine(cluster: str = "dgx-h100-8") -> Engine:
    return Engine(gpt_at, Cluster.load(cluster))


def drawn_layout(graph: OpGraph, block: Block, mesh: Mesh, random: Random) -> Layout:
    """Any legal strategy for every operator that asks for no partial sums; whole activations between blocks."""
    operators: dict[str, dict[str, str]] = {}
    for name, label in zip(block.nodes, block.labels, strict=True):
        legal = [s for s in strategies(graph, graph.nodes[name], mesh.tp) if all(p.kind != "P" for p in s.inputs)]
        operators[label] = {"tp": str(random.choice(legal))}
    whole: list[dict[str, str]] = [{} for _ in block.inputs]
    return Layout(operators=operators, inputs=whole, outputs=[{} for _ in block.outputs])


def drawn_plan(mesh: Mesh, random: Random, micro_batch: int = 2, micro_batches: int = 4, **changes: Any) -> Plan:
    """A plan for the small GPT: layouts by kind of block, stages cut at random."""
    graph = gpt_at(micro_batch)
    kinds = {kind: drawn_layout(graph, blocks[0], mesh, random) for kind, blocks in graph.block_kinds().items()}
    names = [b.name for b in graph.blocks]
    stages = mesh.pp * changes.get("virtual_stages", 1)
    cuts = sorted(random.sample(range(1, len(names)), stages - 1))
    recompute = changes.pop("recompute", None)
    fields: dict[str, Any] = {
        "model": ModelRef(source="gpt", fingerprint=graph.fingerprint),
        "cluster": ClusterRef(name="drawn", devices=mesh.devices),
        "global_batch": micro_batch * micro_batches * mesh.dp,
        "mesh": mesh,
        "stages": [names[0], *(names[c] for c in cuts)],
        "blocks": [
            BlockPlan(name=b.name, layout=b.kind, recompute=recompute or random.choice(("none", "full")))
            for b in graph.blocks
        ],
        "layouts": kinds,
        "zero_stage": 3 if mesh.dp_shard > 1 else 0,
        "micro_batch": micro_batch,
        "micro_batches": micro_batches,
        "schedule": random.choice(("gpipe", "1f1b")) if mesh.pp > 1 else "1f1b",
    }
    return Plan(**{**fields, **changes})
