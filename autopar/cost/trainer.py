"""Trainer: how a training program keeps its states, what it overlaps and which kernels it runs.

The default is autopar's own runtime: fp32 parameters, gradients and AdamW states, collectives in line with compute.
Other programs are described by the same few facts, so that their published runs can be predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.model.graph import TensorMeta


@dataclass(frozen=True)
class Trainer:
    """What a training program does beside the plan.

    Attributes:
        parameter_bytes, gradient_bytes: per element, as kept on the device over the step.
        state_bytes: optimizer states per element (two fp32 moments; 12 with an fp32 master copy).
        optimizer_traffic_bytes: moved per element by the optimizer's step (AdamW in fp32: p, g, m, v in; p, m, v out).
        gather_bytes, reduce_bytes: per element on the wire when parameters are gathered and gradients summed.
        overlap: what runs beside compute: ``fsdp`` (parameter gathers and gradient sums of units), ``dp`` (gradient
            sums during the last backward, parameter gathers during the first forward), ``tp`` (tensor-parallel
            collectives beside the products that they feed).
        interference: part of an overlapped collective's time that it costs the compute beside it (shared memory
            bandwidth and compute units).
        tp_hidden: part of tensor-parallel communication that pipelined products can hide.
        autocast: tensors have the dtypes of a graph captured in the plan's precision, whose operands are turned one by
            one (:mod:`autopar.model.autocast`); else floating tensors are taken to be as narrow as the precision.
        kernels: attention library, as the device file names it.
        fused_pointwise: chains of pointwise operators run as one kernel and keep only its operands.
        fused_norms: norms keep their operand and one or two numbers per row.
        accumulates: weight gradients are added into ``gradient_bytes`` wide ones by the products themselves.
        local_sequence: None where the plan's layouts place the sequence; else graphs hold one context-parallel shard
            of it and attention exchanges heads for sequence (``all_to_all``, Jacobs et al. 2023, arXiv 2309.14509) or
            passes keys and values round (``ring``, Liu et al. 2023, arXiv 2310.01889).
        scatter_sends: pipeline sends are cut over the tensor-parallel ranks and gathered after (Narayanan et al.
            2021, section 4.1).
        keeps_fp8: under fp8, products keep their operands in fp8.
        early_stop: full recomputation ends with the last operator whose result backward needs (torch.utils.checkpoint
            without re-entrance), not at the end of the block.
        packs: shards are packed and unpacked around collectives; programs that keep the cut dimension first need not.
        regathers: products keep their sequence-cut operand and gather it again for backward (Korthikanti et al. 2022,
            section 4.2.2), beside the product that makes the operand's gradient.
        gradient_traffic_bytes: moved per element once a step to clear and scale the gradients.
        weight_gradient_buffers: bytes per element of one kept result for every distinct shape of weight (products that
            add into the gradients hand autograd such a buffer instead).
        metric_bytes: moved per logit and micro-batch by metrics that the program computes from logits.
        step_overhead_s: once a step, beside everything modelled.
    """

    parameter_bytes: int = 4
    gradient_bytes: int = 4
    state_bytes: int = 8
    optimizer_traffic_bytes: int = 28
    gather_bytes: int = 4
    reduce_bytes: int = 4
    overlap: frozenset[str] = frozenset()
    interference: float = 0.0
    tp_hidden: float = 0.0
    autocast: bool = False
    kernels: str = "pytorch"
    fused_pointwise: bool = False
    fused_norms: bool = False
    accumulates: bool = False
    local_sequence: Literal["all_to_all", "ring"] | None = None
    scatter_sends: bool = False
    keeps_fp8: bool = False
    early_stop: bool = False
    packs: bool = True
    regathers: bool = False
    gradient_traffic_bytes: int = 0
    weight_gradient_buffers: int = 0
    metric_bytes: int = 0
    step_overhead_s: float = 0.0


AUTOPAR = Trainer(autocast=True)


def whole_heads(metas: list[TensorMeta], size: int) -> list[TensorMeta]:
    """Attention operands ``[batch, heads, length, width]`` of one context-parallel shard, after heads were exchanged
    for sequence: the whole length, ``1 / size`` of the heads (at least one: keys and values are then replicated)."""
    return [
        TensorMeta((*m.shape[:-3], max(1, m.shape[-3] // size), m.shape[-2] * size, m.shape[-1]), m.dtype)
        for m in metas
    ]
