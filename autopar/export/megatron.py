"""Megatron-LM: flags of its training programs, as a launch script for ``pretrain_gpt.py``.

Source of names and meanings: the fields of ``ModelParallelConfig``, ``TransformerConfig`` and
``DistributedDataParallelConfig`` of megatron-core 0.16, which the flags are named after;
megatron/training/arguments.py and docs/user-guide/features/megatron_fsdp.md of Megatron-LM.
"""

from __future__ import annotations

from itertools import groupby

from autopar.export.exported import Exported, Machines
from autopar.export.layers import Stack, recompute_kinds, sequence_parallel, stack_of
from autopar.export.script import Flag, launch_script
from autopar.plan import Plan

SHARDING = {2: "optim_grads", 3: "optim_grads_params"}


def export(plan: Plan, machines: Machines) -> Exported:
    """The plan as a bash script that starts Megatron-LM."""
    stack = stack_of(plan)
    left = [
        "the model and the data: add --hidden-size, --num-attention-heads, --seq-length, ... of "
        f"{plan.model.source} as arguments of the script",
    ]
    flags = [
        *_sizes(plan),
        *_layers(plan, stack, left),
        *_batch(plan, left),
        *_data_parallel(plan, left),
        *_recompute(plan, stack, left),
    ]
    if plan.mesh.tp > 1:
        left.append("placements of single operators: Megatron-LM cuts columns, then rows, of each pair of products")
    text = launch_script(
        "Megatron-LM settings, from a plan of autopar.", left, machines, flags, '"${PROGRAM:-pretrain_gpt.py}"'
    )
    return Exported("megatron", text, "bash FILE --hidden-size ... --data-path ...", tuple(left))


def _sizes(plan: Plan) -> list[Flag]:
    mesh = plan.mesh
    flags: list[Flag] = [
        ("--tensor-model-parallel-size", str(mesh.tp)),
        ("--pipeline-model-parallel-size", str(mesh.pp)),
        ("--context-parallel-size", str(mesh.cp)),
        ("--expert-model-parallel-size", str(mesh.ep)),
    ]
    return [*flags, ("--sequence-parallel",)] if mesh.tp > 1 and sequence_parallel(plan) else flags


def _layers(plan: Plan, stack: Stack, left: list[str]) -> list[Flag]:
    """Number of layers and, in a pipeline, the layers of each stage in its notation (E, t for a layer, L)."""
    flags: list[Flag] = [("--num-layers", str(len(stack.names)))] if stack.single else []
    if not stack.single:
        left.append("layers: the plan's blocks are not one stack of layers")
    if plan.mesh.pp == 1:
        return flags
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        left.append(f"schedule {plan.schedule}: Megatron-LM runs 1F1B, interleaved where stages are virtual")
    if stack.single:
        flags.append(("--pipeline-model-parallel-layout", layout_text(stack)))
    else:
        left.append("stages: the cut is not one between layers of a single stack; Megatron-LM cuts evenly")
    return flags


def layout_text(stack: Stack) -> str:
    """Stages in the notation of Megatron-LM: ``Et*3|t*4|t*3L`` for 3, 4 and 3 layers."""
    parts = ["t" * len(stage) for stage in stack.stages]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "L"
    return "|".join(_short(part) for part in parts)


def _short(part: str) -> str:
    runs = ((letter, len(list(run))) for letter, run in groupby(part))
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _batch(plan: Plan, left: list[str]) -> list[Flag]:
    flags: list[Flag] = [
        ("--micro-batch-size", str(plan.micro_batch)),
        ("--global-batch-size", str(plan.global_batch)),
        ("--seed", str(plan.seed)),
    ]
    if plan.precision != "fp32":
        flags.append(("--fp16",) if plan.precision == "fp16" else ("--bf16",))
        left.append("autocast: Megatron-LM keeps 16-bit weights beside fp32 ones, the plan casts fp32 weights")
    if plan.precision == "fp8":
        flags.append(("--fp8-format", "hybrid"))
    if plan.offload == "optimizer":
        flags.append(("--optimizer-cpu-offload",))
    elif plan.offload != "none":
        left.append(f"offload {plan.offload}")
    if plan.compile != "none":
        left.append(f"compile {plan.compile}: Megatron-LM has fused kernels instead")
    return flags


def _data_parallel(plan: Plan, left: list[str]) -> list[Flag]:
    mesh, flags = plan.mesh, list[Flag]()
    if mesh.dp * mesh.cp == 1:
        return flags
    if plan.zero_stage == 1:
        flags.append(("--use-distributed-optimizer",))
    elif plan.zero_stage in SHARDING:
        flags.append(("--use-megatron-fsdp",))
        flags.append(("--data-parallel-sharding-strategy", SHARDING[plan.zero_stage]))
        # what Megatron-FSDP's user guide asks for beside it
        flags += [("--use-distributed-optimizer",), ("--no-gradient-accumulation-fusion",)]
        flags.append(("--ckpt-format", "fsdp_dtensor"))
    if plan.zero_stage and mesh.dp_replicate > 1:
        flags.append(("--num-distributed-optimizer-instances", str(mesh.dp_replicate)))
    if plan.gradient_reduction.dtype == "fp32" and plan.precision != "fp32":
        flags.append(("--accumulate-allreduce-grads-in-fp32",))
    if plan.zero_stage == 0:
        flags.append(("--ddp-bucket-size", str(int(plan.gradient_reduction.bucket_mib * 2**20 / 4))))
    return flags


def _recompute(plan: Plan, stack: Stack, left: list[str]) -> list[Flag]:
    kinds = recompute_kinds(plan)
    if kinds == {"none"}:
        return []
    if kinds <= {"none", "selective"}:
        if len(kinds) > 1:
            left.append("recompute differs between layers: the script says selective for all")
        left.append("which operators are recomputed: Megatron-LM has a list of its own")
        return [("--recompute-granularity", "selective")]
    if "selective" in kinds:
        left.append("selective recomputation beside full: Megatron-LM has one kind at a time")
    most = max(stack.recomputed)
    if len(set(stack.recomputed)) > 1 or not stack.recomputed_first:
        left.append(f"which layers are recomputed: the script says the first {most} of every stage")
    return [
        ("--recompute-granularity", "full"),
        ("--recompute-method", "block"),
        ("--recompute-num-layers", str(most)),
    ]
