"""Which training program a measured run used, as facts of that program; never of a single run.

Megatron-LM and what builds on it (NeMo, Megatron Bridge): 16-bit weights, fp32 gradients that products add into, fp32
master weights and moments; fused pointwise kernels and norms. FSDP programs (llm-foundry, torchtitan): fp32 sharded
parameters gathered in 16 bit.
"""

from __future__ import annotations

from autopar.cost.trainer import Trainer
from autopar.validate.rows import Row

INTERFERENCE = 0.4  # of overlapped communication; one number for all programs and devices
TP_HIDDEN = 0.5  # userbuffer and asynchronous tensor parallelism pipeline a product with its collective


def trainer_of(row: Row, interference: float = INTERFERENCE) -> Trainer:
    """The program of a row, by how it shards: ``zero_stage`` 3 is FSDP, everything else is Megatron-like."""
    words = set((row.overlap or "none").replace(",", "+").split("+"))
    overlap = frozenset(
        name
        for name, marks in (("fsdp", {"fsdp-prefetch"}), ("dp", {"dp"}), ("tp", {"tp", "async-tp"}))
        if words & marks
    )
    if row.zero_stage == 3 and "dp" not in overlap:
        return _fsdp(row, overlap, interference)
    if row.zero_stage == 3:
        overlap = overlap | {"fsdp"}
    # fp32 gradients are kept of bf16 weights; not in fp16 (Megatron-LM) nor in NVIDIA's fp8 recipes
    wide = 4 if row.precision == "bf16" else 2
    first_attention = row.flash_attention == 0
    return Trainer(
        parameter_bytes=2,
        gradient_bytes=wide,
        state_bytes=12,
        optimizer_traffic_bytes=30,
        gather_bytes=2,
        reduce_bytes=wide,
        overlap=overlap,
        interference=interference,
        tp_hidden=TP_HIDDEN,
        kernels="pytorch" if first_attention else "transformer_engine",
        fused_pointwise=True,
        fused_norms=True,
        accumulates=True,
        local_sequence="ring" if overlap else "all_to_all",
        scatter_sends=True,
        packs=False,
        regathers=True,
        keeps_fp8=True,
        gradient_traffic_bytes=3 * wide,
        weight_gradient_buffers=2,
    )


def _fsdp(row: Row, overlap: frozenset[str], interference: float) -> Trainer:
    foundry = row.family == "mpt"  # llm-foundry: gradients summed in 16 bit (mixed_precision PURE), FlashAttention-1
    return Trainer(
        gather_bytes=2,
        reduce_bytes=2 if foundry else 4,
        overlap=overlap,
        interference=interference,
        tp_hidden=TP_HIDDEN,
        kernels="flash_attention_1" if foundry else "pytorch",
        fused_pointwise=bool(row.compile),
        fused_norms=True,
        local_sequence="ring",
        packs=False,
        early_stop=True,
        # llm-foundry's training metrics: a second cross entropy, in fp32 (cast, log-softmax, pick)
        metric_bytes=14 if foundry else 0,
    )
