"""Predict one measured run: its model, cluster and plan, through the same cost engine as every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate
from autopar.errors import InputError
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.graph import Block, OpGraph, OpNode
from autopar.plan import BlockPlan, ClusterRef, Layout, Mesh, ModelRef, Plan
from autopar.units import GIB
from autopar.validate.layouts import tensor_parallel_layout
from autopar.validate.models import Shape, job_of
from autopar.validate.rows import Row
from autopar.validate.trainers import INTERFERENCE, trainer_of

CAPTURED_LAYERS = 3  # first, repeated, last
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Prediction:
    """What the engine says of one run; bytes of the worst rank."""

    step_time_s: float
    peak_allocated: int
    peak_reserved: int
    estimate: Estimate


@dataclass(frozen=True)
class Choice:
    """Settings that a row leaves open, as chosen."""

    micro_batch: int
    recompute: str
    vpp: int


class Predictor:
    """Predicts runs; captured models and priced blocks are shared between runs that agree in them."""

    def __init__(self, interference: float = INTERFERENCE) -> None:
        self._interference = interference
        self._graphs: dict[tuple[object, ...], OpGraph] = {}
        self._engines: dict[tuple[object, ...], Engine] = {}

    def predict(self, row: Row) -> Prediction:
        """Prediction of a run; settings that it leaves open are the fastest that fit.

        Raises:
            AutoparError: the run's model, cluster or plan is impossible.
        """
        best: Prediction | None = None
        limit = cluster_of(row).memory_limit_bytes
        for choice in _choices(row):
            found = self._predict(row, choice)
            if best is None or _rank(found, limit) < _rank(best, limit):
                best = found
        assert best is not None
        return best

    def _predict(self, row: Row, choice: Choice) -> Prediction:
        mesh = mesh_of(row)
        local, rest = divmod(row.global_batch, mesh.dp)
        if rest:
            raise InputError(f"global_batch {row.global_batch} does not divide over dp {mesh.dp}")
        micro = min(choice.micro_batch, local)
        count, left = divmod(local, micro)
        engine = self._engine(row)
        main = engine.estimate(self._plan(engine, row, choice, mesh, micro, count))
        time = main.step_time_s
        if left:
            if mesh.pp > 1:
                raise InputError(f"micro_batch {micro} does not divide the local batch {local}")
            last = engine.estimate(self._plan(engine, row, choice, mesh, left, 1))
            time += last.stage_times[0].forward_s + last.stage_times[0].backward_s
        allocated = max(stage.allocated for stage in main.stages)
        return Prediction(time, allocated, main.peak_reserved, main)

    def _engine(self, row: Row) -> Engine:
        hardware = (row.gpu, row.gpus, row.gpus_per_node, row.intra_node, row.inter_node_gbps_per_gpu)
        key = (*shape_key(row), *hardware, row.precision, row.compile)
        if key not in self._engines:
            at: Callable[[int], OpGraph] = lambda batch: self._graph(row, batch)  # noqa: E731
            self._engines[key] = Engine(at, cluster_of(row), row.precision, trainer_of(row, self._interference))
        return self._engines[key]

    def _graph(self, row: Row, batch: int) -> OpGraph:
        key = (*shape_key(row), batch)
        if key not in self._graphs:
            layers = row.layers if row.experts and row.layers <= 8 else min(row.layers, _captured(row))
            shape = Shape(
                row, layers, row.seq_len // (row.cp or 1), (row.experts or 0) // (row.ep or 1), DTYPES[row.precision]
            )
            self._graphs[key] = deepen(capture(job_of(shape), batch, cluster_of(row).device.kind), row.layers - layers)
        return self._graphs[key]

    def _plan(self, engine: Engine, row: Row, choice: Choice, mesh: Mesh, micro: int, count: int) -> Plan:
        graph = engine.graph(micro)
        layouts: dict[str, Layout] = {}
        for kind, blocks in graph.block_kinds().items():
            layouts[kind] = tensor_parallel_layout(graph, blocks[0], mesh.tp, bool(row.sequence_parallel))
        inner = [b for b in graph.blocks if b.name.startswith("blocks.")]
        stages = _cut(graph.blocks, inner, mesh.pp * choice.vpp)
        return Plan(
            model=ModelRef(source=row.id, fingerprint=graph.fingerprint),
            cluster=ClusterRef(name=engine.cluster.name, devices=mesh.devices),
            global_batch=micro * count * mesh.dp,
            mesh=mesh,
            stages=stages,
            blocks=[
                BlockPlan(
                    name=b.name, layout=b.kind, recompute=choice.recompute if b.name.startswith("blocks.") else "none"
                )
                for b in graph.blocks
            ],
            layouts=layouts,
            zero_stage=row.zero_stage or 0,
            schedule="interleaved_1f1b" if choice.vpp > 1 else "1f1b",
            virtual_stages=choice.vpp,
            micro_batch=micro,
            micro_batches=count,
            precision=row.precision,
        )


def _rank(found: Prediction, limit: int) -> tuple[int, float]:
    """Runs that fit before those that do not, then by time (by excess where none fits)."""
    over = found.peak_reserved - limit
    return (max(0, over), found.step_time_s)


def _captured(row: Row) -> int:
    return CAPTURED_LAYERS + (1 if row.experts else 0)


def shape_key(row: Row) -> tuple[object, ...]:
    """What the captured model depends on."""
    fields = (
        "family layers hidden ffn heads kv_heads head_dim vocab tied_embeddings experts top_k moe_ffn "
        "shared_expert_ffn dense_layers q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim seq_len "
        "cp ep flash_attention zero_stage overlap"
    ).split()
    return (*(getattr(row, name) for name in fields), DTYPES.get(row.precision))


def cluster_of(row: Row) -> Cluster:
    """The cluster of a run."""
    if row.gpus % row.gpus_per_node and row.gpus > row.gpus_per_node:
        raise InputError(f"{row.gpus} gpus are not whole nodes of {row.gpus_per_node}")
    nodes = max(1, row.gpus // row.gpus_per_node)
    per_node = min(row.gpus, row.gpus_per_node)
    return Cluster.build(
        row.gpu, nodes, per_node, row.intra_node or "nvlink3", inter_node_gbps=row.inter_node_gbps_per_gpu
    )


def mesh_of(row: Row) -> Mesh:
    """The mesh of a run; ``dp`` left open is what the other axes leave."""
    tp, cp, pp = row.tp or 1, row.cp or 1, row.pp or 1
    dp = row.dp or row.gpus // (tp * cp * pp)
    if dp * tp * cp * pp != row.gpus:
        raise InputError(f"dp {dp} x tp {tp} x cp {cp} x pp {pp} are not {row.gpus} gpus")
    sharded = (row.zero_stage or 0) > 0
    return Mesh(pp=pp, dp_replicate=1 if sharded else dp, dp_shard=dp if sharded else 1, cp=cp, tp=tp, ep=row.ep or 1)


def _choices(row: Row) -> list[Choice]:
    """Every combination of the settings that a row leaves open."""
    pp, local = row.pp or 1, row.global_batch // (mesh_of(row).dp)
    whole = pp > 1 and row.zero_stage == 3 and row.micro_batch == local  # a pipeline's local batch, cut up further
    micros = [row.micro_batch] if row.micro_batch and not whole else [m for m in (1, 2, 4, 8, 16, 32) if local % m == 0]
    recomputes = [row.recompute] if row.recompute else ["none", "selective", "full"]
    several = [v for v in (1, 2, 4, 8, 16) if v == 1 or (pp > 1 and pp * v <= row.layers)]
    virtuals = [row.vpp] if row.vpp else several
    found = [Choice(m, r, v) for m in micros for r in recomputes for v in virtuals if v == 1 or (local // m) % pp == 0]
    if not found:
        raise InputError("no micro-batch goes with the row's local batch and pipeline")
    return found


def _cut(blocks: tuple[Block, ...], inner: list[Block], count: int) -> list[str]:
    """First block of each stage: layers as evenly as they go, what is left over in the middle stages; embedding with
    the first stage and head with the last."""
    if count > len(inner):
        raise InputError(f"{count} stages are more than the {len(inner)} layers")
    base, extra = divmod(len(inner), count)
    sizes = [
        base + (1 if extra and (count - extra) // 2 <= i < (count - extra) // 2 + extra else 0) for i in range(count)
    ]
    starts, at = [blocks[0].name], 0
    for size in sizes[:-1]:
        at += size
        starts.append(inner[at].name)
    return starts


def deepen(graph: OpGraph, more: int) -> OpGraph:
    """The same model with the last but one layer repeated ``more`` times under new names.

    The copies are alike in kind, so they are priced as the original; only the chain and the totals grow.
    """
    if more <= 0:
        return graph
    layers = [i for i, b in enumerate(graph.blocks) if b.name.startswith("blocks.")]
    at = layers[-2]
    model = graph.blocks[at]
    nodes: dict[str, OpNode] = dict(graph.nodes)
    table = dict(graph.facts.setdefault("fx", {n.name: n for n in graph.fx_graph.nodes}))
    copies: list[Block] = []
    entering = model.outputs
    for number in range(more):
        named = {name: f"{name}__{number}" for name in (*model.nodes, *_own(graph, model))}
        named.update(zip(model.inputs, entering if len(entering) == len(model.inputs) else model.inputs, strict=True))
        shared = [n for n in model.inputs if graph.nodes[n].kind != "op"]
        named.update({n: n for n in shared})
        for old, new in list(named.items()):
            if new not in nodes:
                node = graph.nodes[old]
                nodes[new] = replace(node, name=new, inputs=tuple(named.get(i, i) for i in node.inputs))
                if old in table:
                    table[new] = table[old]
        block = Block(
            name=f"{model.name}_{number}",
            kind=model.kind,
            nodes=tuple(named[n] for n in model.nodes),
            labels=model.labels,
            inputs=tuple(named.get(n, n) for n in model.inputs),
            outputs=tuple(named[n] for n in model.outputs),
            parameters=tuple(named.get(n, n) for n in model.parameters),
            prelude=model.prelude,
        )
        copies.append(block)
        entering = block.outputs
    rename = dict(zip(model.outputs, entering, strict=True))
    after = [replace(b, inputs=tuple(rename.get(n, n) for n in b.inputs)) for b in graph.blocks[at + 1 :]]
    blocks = (*graph.blocks[: at + 1], *copies, *after)
    return replace(graph, nodes=nodes, blocks=blocks, facts={"fx": table})


def _own(graph: OpGraph, block: Block) -> list[str]:
    return [n for n in block.parameters if graph.nodes[n].kind == "parameter"]


def gib(nbytes: int) -> float:
    return nbytes / GIB
