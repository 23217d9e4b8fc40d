"""DeepSpeed: its JSON configuration.

Source of names and meanings: ``DeepSpeedConfig``, ``DeepSpeedZeroConfig`` and ``TPTrainingConfig`` of deepspeed 0.19.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.export.exported import Exported, Machines
from autopar.export.layers import recompute_kinds
from autopar.plan import Plan


def export(plan: Plan, machines: Machines) -> Exported:
    """The plan as ``ds_config.json``."""
    left: list[str] = []
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.micro_batches,
        "zero_optimization": _zero(plan, left),
        **_precision(plan, left),
    }
    mesh = plan.mesh
    if mesh.tp > 1:
        config["tensor_parallel"] = {"autotp_size": mesh.tp}
        left.append("placements of single operators: DeepSpeed chooses them for the models that it knows")
    if mesh.pp > 1:
        cuts = ", ".join(plan.stages)
        left.append(
            f"pipeline: no setting; wrap the model in PipelineModule(num_stages={mesh.pp}), stages begin at {cuts}"
        )
        if plan.schedule != "1f1b":
            left.append(f"schedule {plan.schedule}: DeepSpeed runs 1F1B")
    inside = {"cp": mesh.cp, "ep": mesh.ep}
    left += [f"{axis}={n}: set in the model's code, not in the configuration" for axis, n in inside.items() if n > 1]
    if recompute_kinds(plan) != {"none"}:
        left.append(f"recompute: call deepspeed.checkpointing.checkpoint in {_recomputed(plan)}")
    if plan.compile != "none":
        left.append(f"compile {plan.compile}: call engine.compile()")
    left.append(f"seed {plan.seed}: no setting; call torch.manual_seed")
    use = f"deepspeed --num_nodes {machines.nodes} --num_gpus {machines.per_node} train.py --deepspeed_config FILE"
    return Exported("deepspeed", json.dumps(config, indent=2) + "\n", use, tuple(left))


def _zero(plan: Plan, left: list[str]) -> dict[str, Any]:
    bucket = int(plan.gradient_reduction.bucket_mib * 2**20 / 4)
    zero: dict[str, Any] = {"stage": plan.zero_stage, "overlap_comm": True, "reduce_bucket_size": bucket}
    if plan.zero_stage and plan.mesh.dp_replicate > 1:
        left.append(f"dp_replicate={plan.mesh.dp_replicate}: ZeRO stage {plan.zero_stage} shards over all data ranks")
    if plan.offload == "optimizer":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    elif plan.offload != "none":
        left.append(f"offload {plan.offload}")
    return zero


def _precision(plan: Plan, left: list[str]) -> dict[str, Any]:
    if plan.precision == "fp32":
        return {}
    if plan.precision == "fp8":
        left.append("precision fp8: no setting; the configuration says bf16")
    left.append("autocast: DeepSpeed keeps 16-bit weights beside fp32 ones, the plan casts fp32 weights")
    kind = "fp16" if plan.precision == "fp16" else "bf16"
    reduced = plan.gradient_reduction.dtype
    return {
        kind: {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": reduced,
    }


def _recomputed(plan: Plan) -> str:
    names = [b.name for b in plan.blocks if b.recompute != "none"]
    return "every block" if len(names) == len(plan.blocks) else ", ".join(names)
