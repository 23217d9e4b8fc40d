"""Hugging Face accelerate: the YAML file of ``accelerate launch --config_file``.

Source of names and meanings: ``ClusterConfig`` and the launch arguments of accelerate 1.16.
"""

from __future__ import annotations

import json
from typing import Any

from autopar.export.exported import Exported, Machines, comment
from autopar.export.layers import recompute_kinds
from autopar.plan import Plan


def export(plan: Plan, machines: Machines) -> Exported:
    """The plan as a configuration of accelerate."""
    left: list[str] = []
    mesh = plan.mesh
    fsdp = plan.zero_stage >= 2 or mesh.tp > 1 or mesh.cp > 1
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "MULTI_GPU" if mesh.devices > 1 else "NO",
        "mixed_precision": "no" if plan.precision == "fp32" else plan.precision,
        "num_machines": machines.nodes,
        "num_processes": mesh.devices,
        "machine_rank": 0,
        "main_training_function": "main",
    }
    if machines.nodes > 1:
        config["rdzv_backend"] = "c10d"
        left.append("the nodes: give --machine_rank, --main_process_ip and --main_process_port to accelerate launch")
    if fsdp:
        config["fsdp_config"] = _fsdp(plan, left)
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": mesh.dp_replicate,
            "parallelism_config_dp_shard_size": mesh.dp_shard,
            "parallelism_config_tp_size": mesh.tp,
            "parallelism_config_cp_size": mesh.cp,
        }
    elif recompute_kinds(plan) != {"none"}:
        left.append("recompute: without FSDP, call the model's gradient_checkpointing_enable()")
    left += _left(plan, fsdp)
    head = comment("accelerate settings, from a plan of autopar.", left)
    return Exported("accelerate", head + to_yaml(config), "accelerate launch --config_file FILE train.py", tuple(left))


def _fsdp(plan: Plan, left: list[str]) -> dict[str, Any]:
    kinds = recompute_kinds(plan)
    if len(kinds) > 1 or "selective" in kinds:
        left.append("recompute differs between or inside layers: accelerate recomputes all layers or none; it says all")
    left.append("the class of a layer: add fsdp_transformer_layer_cls_to_wrap, unless the model names it itself")
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": plan.zero_stage == 3,
        "fsdp_offload_params": plan.offload == "optimizer",
        "fsdp_activation_checkpointing": kinds != {"none"},
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _left(plan: Plan, fsdp: bool) -> list[str]:
    mesh, left = plan.mesh, list[str]()
    left.append(
        f"batch: in the script, batch_size={plan.micro_batch} in each process and "
        f"Accelerator(gradient_accumulation_steps={plan.micro_batches})"
    )
    for axis in ("pp", "ep"):
        if getattr(mesh, axis) > 1:
            left.append(f"{axis}={getattr(mesh, axis)}: accelerate has no setting for it")
    if mesh.tp > 1:
        left.append("placements of single operators: the model's own tensor-parallel plan is used")
    if plan.zero_stage == 1:
        left.append("zero_stage 1: without FSDP every process keeps all optimizer states")
    if plan.offload == "activations" or (plan.offload != "none" and not fsdp):
        left.append(f"offload {plan.offload}")
    if plan.compile != "none":
        left.append(f"compile {plan.compile}: add dynamo_config")
    left.append(f"seed {plan.seed}: call accelerate.utils.set_seed")
    return left


def to_yaml(config: dict[str, Any], indent: str = "") -> str:
    """YAML of nested dictionaries of scalars; scalars are written as JSON, which YAML reads."""
    lines = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:\n{to_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)
