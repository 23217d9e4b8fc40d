"""Megatron-LM's flags, as in megatron/training/arguments.py and megatron-core 0.16."""

from __future__ import annotations

import re
from typing import Any, Literal

from autopar.errors import InputError
from autopar.export.settings import Precision, Settings
from autopar.export.words import Words, flags_in, present, text, whole

STAGES: dict[str, Literal[0, 1, 2, 3]] = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
UNPRICED = {
    "overlap_grad_reduce": "gradient sums beside backward",
    "overlap_param_gather": "parameter gathers beside forward",
    "tp_comm_overlap": "tensor-parallel collectives beside products",
    "optimizer_cpu_offload": "optimizer states in host memory",
    "cpu_offloading": "activations in host memory",
    "decoder_first_pipeline_num_layers": "fewer layers in the first stage",
    "decoder_last_pipeline_num_layers": "fewer layers in the last stage",
}


def read(given: str) -> Settings:
    """Settings from flags.

    Raises:
        InputError: a value makes no sense.
    """
    words = flags_in(given)
    pp, zero = whole(words, "pipeline_model_parallel_size", 1), _zero(words)
    layers, virtual = _stages(words, pp)
    recompute, first = _recompute(words)
    replicas: dict[str, Any] = {"dp_replicate": 0, "dp_shard": 1}
    if zero:
        replicas = {"dp_replicate": whole(words, "num_distributed_optimizer_instances", 1), "dp_shard": 0}
    return Settings(
        trainer="megatron",
        pp=pp,
        cp=whole(words, "context_parallel_size", 1),
        tp=whole(words, "tensor_model_parallel_size", 1),
        ep=whole(words, "expert_model_parallel_size", 1),
        zero_stage=zero,
        micro_batch=whole(words, "micro_batch_size", 1),
        global_batch=whole(words, "global_batch_size", 0) or None,
        precision=_precision(words),
        recompute=recompute,
        recompute_first=first,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        layers=layers,
        notes=tuple(f"--{name.replace('_', '-')}: {what}" for name, what in UNPRICED.items() if name in words),
        **replicas,
    )


def _zero(words: Words) -> Literal[0, 1, 2, 3]:
    strategy = text(words, "data_parallel_sharding_strategy", "no_shard")
    if strategy not in STAGES:
        raise InputError(
            f"--data-parallel-sharding-strategy {strategy!r} is unknown", f"Use one of {', '.join(STAGES)}"
        )
    if present(words, "use_megatron_fsdp") and STAGES[strategy]:
        return STAGES[strategy]
    return 1 if present(words, "use_distributed_optimizer") else 0


def _precision(words: Words) -> Precision:
    if "fp8_format" in words:
        return "fp8"
    return "bf16" if present(words, "bf16") else "fp16" if present(words, "fp16") else "fp32"


def _recompute(words: Words) -> tuple[Literal["none", "selective", "full"], int | None]:
    granularity = text(words, "recompute_granularity", "none")
    if present(words, "recompute_activations"):
        granularity = "selective"
    if granularity == "full":
        block = text(words, "recompute_method", "uniform") == "block"
        return "full", whole(words, "recompute_num_layers", 1) if block else None
    if granularity not in ("none", "selective"):
        raise InputError(f"--recompute-granularity {granularity!r} is unknown", "Use full or selective")
    return ("selective" if granularity == "selective" else "none"), None


def _stages(words: Words, pp: int) -> tuple[tuple[int, ...], int]:
    """Layers of each stage, and virtual stages per rank."""
    if pp == 1:
        return (), 1
    layout = text(words, "pipeline_model_parallel_layout", "")
    if layout:
        counts = layers_of(layout)
        if len(counts) % pp:
            raise InputError(
                f"--pipeline-model-parallel-layout {layout!r} has {len(counts)} stages for {pp} ranks",
                "Give a multiple of the ranks",
            )
        return counts, len(counts) // pp
    total = whole(words, "num_layers", 0)
    virtual = whole(words, "num_virtual_stages_per_pipeline_rank", 1)
    each = whole(words, "num_layers_per_virtual_pipeline_stage", 0)
    if each > 0 and total:
        virtual = total // pp // each
    if not total or virtual < 1 or total % (pp * virtual):
        return (), max(1, virtual)
    return (total // (pp * virtual),) * (pp * virtual), virtual


def layers_of(layout: str) -> tuple[int, ...]:
    """Layers of each stage in Megatron-LM's notation: ``Et*3|(tt|)*2tL`` is 3, 2, 2 and 1.

    Raises:
        InputError: the notation has other letters than E, t, m and L.
    """
    written = layout.replace(",", "").replace(" ", "")
    written = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m[1] * int(m[2]), written)
    written = re.sub(r"(\w)\*(\d+)", lambda m: m[1] * int(m[2]), written)
    if not re.fullmatch(r"[EtmL|]+", written):
        raise InputError(f"--pipeline-model-parallel-layout {layout!r} cannot be read", "Write it as Et*3|t*3L")
    return tuple(part.count("t") for part in written.split("|"))
