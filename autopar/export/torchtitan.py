"""torchtitan: flags of its ``TrainingConfig``, ``ParallelismConfig`` and ``CompileConfig`` (0.3), as a launch script.

Source of names and meanings: torchtitan/config/configs.py and the ``ActivationCheckpointingConfig`` of
torchtitan/distributed/activation_checkpoint.py.
"""

from __future__ import annotations

from autopar.export.exported import Exported, Machines
from autopar.export.layers import Stack, recompute_kinds, sequence_parallel, stack_of
from autopar.export.script import Flag, launch_script
from autopar.plan import Plan

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def export(plan: Plan, machines: Machines) -> Exported:
    """The plan as a bash script that starts torchtitan."""
    left: list[str] = [
        f"the model: torchtitan trains models of its own; MODULE and CONFIG must name the one like {plan.model.source}",
    ]
    flags = [*_parallelism(plan, left), *_training(plan, left), *_pipeline(plan, stack_of(plan), left)]
    if plan.compile == "inductor":
        flags.append(("--compile.enable",))
    flags.append((f"activation-checkpoint:{_recompute(plan, left)}",))  # a subcommand: after every flag
    setup = ': "${MODULE:?name a torchtitan module, such as llama3}" "${CONFIG:?name one of its configs}"\n'
    start = '-m torchtitan.train --module "$MODULE" --config "$CONFIG"'
    text = launch_script("torchtitan settings, from a plan of autopar.", left, machines, flags, start, setup)
    return Exported("torchtitan", text, "MODULE=llama3 CONFIG=llama3_8b bash FILE", tuple(left))


def _parallelism(plan: Plan, left: list[str]) -> list[Flag]:
    mesh = plan.mesh
    sizes = {
        "data_parallel_replicate_degree": mesh.dp_replicate,
        "data_parallel_shard_degree": mesh.dp_shard,
        "tensor_parallel_degree": mesh.tp,
        "pipeline_parallel_degree": mesh.pp,
        "context_parallel_degree": mesh.cp,
        "expert_parallel_degree": mesh.ep,
    }
    flags: list[Flag] = [(f"--parallelism.{name}", str(size)) for name, size in sizes.items()]
    if mesh.tp > 1:
        word = "" if sequence_parallel(plan) else "no-"
        flags.append((f"--parallelism.{word}enable_sequence_parallel",))
        left.append("placements of single operators: torchtitan has one tensor-parallel layout for each model")
    if mesh.dp_shard > 1:
        flags.append(("--parallelism.fsdp_reshard_after_forward", "always" if plan.zero_stage == 3 else "never"))
        if plan.zero_stage < 2:
            left.append(f"zero_stage {plan.zero_stage}: torchtitan's shards divide gradients too, as in stage 2")
    return flags


def _training(plan: Plan, left: list[str]) -> list[Flag]:
    piped = plan.mesh.pp > 1
    local = plan.micro_batch * (plan.micro_batches if piped else 1)
    flags: list[Flag] = [
        ("--training.local_batch_size", str(local)),
        ("--training.global_batch_size", str(plan.global_batch)),
        ("--training.mixed_precision_param", "float32" if plan.precision == "fp32" else "bfloat16"),
        ("--debug.seed", str(plan.seed)),
    ]
    if plan.precision in ("fp16", "fp8"):
        left.append(f"precision {plan.precision}: a converter in torchtitan's config; the flags say bfloat16")
    if plan.gradient_reduction.dtype != "fp32":
        left.append(f"gradient_reduction.dtype {plan.gradient_reduction.dtype}: torchtitan sums in fp32")
    if plan.offload == "optimizer":
        flags.append(("--training.enable_cpu_offload",))
        left.append("offload optimizer: torchtitan offloads parameters and gradients with it")
    elif plan.offload != "none":
        left.append(f"offload {plan.offload}")
    if piped:
        flags += [
            ("--training.disable_cuda_graphs",),
            ("--parallelism.pipeline_parallel_microbatch_size", str(plan.micro_batch)),
            ("--parallelism.pipeline_parallel_schedule", SCHEDULES[plan.schedule]),
        ]
    return flags


def _pipeline(plan: Plan, stack: Stack, left: list[str]) -> list[Flag]:
    """The modules of each stage, under torchtitan's names for them."""
    if plan.mesh.pp == 1:
        return []
    if not stack.single:
        left.append("stages: the cut is not one between layers of a single stack; torchtitan cuts evenly")
        return []
    parts = [[f"layers.{i}" for i in stage] for stage in stack.stages]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "lm_head"]
    return [("--parallelism.module_fqns_per_model_part", *(",".join(part) for part in parts))]


def _recompute(plan: Plan, left: list[str]) -> str:
    kinds = recompute_kinds(plan)
    if len(kinds) == 1:
        if kinds == {"selective"}:
            left.append("which operators are recomputed: torchtitan has one list of its own")
        return kinds.pop()
    left.append("recompute differs between layers: torchtitan recomputes all or none; the script says all")
    return "full"
