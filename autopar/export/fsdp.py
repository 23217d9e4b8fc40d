"""PyTorch alone: a Python module whose ``apply(model)`` shards, replicates and recomputes as the plan says."""

from __future__ import annotations

from autopar.export.exported import Exported, Machines, comment
from autopar.export.layers import stack_of
from autopar.plan import Plan

DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp8": "torch.bfloat16"}

SHARDED = '''
def apply(model: nn.Module) -> nn.Module:
    """Recomputes and shards a model in place; call it in every process, before the optimizer is made."""
    for name in RECOMPUTE:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))
    mesh = init_device_mesh(DEVICE, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    for name in UNITS:
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=PRECISION, reshard_after_forward=RESHARD)
    return fully_shard(model, mesh=mesh, mp_policy=PRECISION, reshard_after_forward=RESHARD)
'''
REPLICATED = '''
def apply(model: nn.Module) -> nn.Module:
    """Recomputes in place and replicates a model; call it in every process, before the optimizer is made."""
    for name in RECOMPUTE:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)
'''


def export(plan: Plan, machines: Machines) -> Exported:
    """The plan as a Python module on torch alone."""
    layers = stack_of(plan).names
    left = _left(plan, layers)
    sharded = plan.zero_stage > 0 and plan.mesh.dp_shard > 1
    head = comment("FSDP settings, from a plan of autopar: model = apply(model).", left)
    again = [b.name for b in plan.blocks if b.recompute == "full" and b.name in layers]
    values = [
        ("DEVICE", '"cuda" if torch.cuda.is_available() else "cpu"'),
        ("MICRO_BATCH", f"{plan.micro_batch}  # samples of each process in one forward pass"),
        ("MICRO_BATCHES", f"{plan.micro_batches}  # forward and backward passes in one step"),
        ("RECOMPUTE", _names(again)),
    ]
    if sharded:
        mesh = {"dp_replicate": plan.mesh.dp_replicate, "dp_shard": plan.mesh.dp_shard}
        mesh = {axis: size for axis, size in mesh.items() if size > 1}
        values += [
            ("MESH", repr(mesh).replace("'", '"')),
            ("UNITS", _names(layers)),
            ("RESHARD", str(plan.zero_stage == 3)),
            ("PRECISION", _policy(plan)),
        ]
    else:
        values.append(("BUCKET_MIB", f"{plan.gradient_reduction.bucket_mib:g}"))
    body = "".join(f"{name} = {value}\n" for name, value in values)
    text = head + _imports(sharded) + "\n" + body + "\n" + (SHARDED if sharded else REPLICATED)
    use = f"torchrun --nnodes {machines.nodes} --nproc-per-node {machines.per_node} train.py  # which imports FILE"
    return Exported("fsdp", text, use, tuple(left))


def _imports(sharded: bool) -> str:
    lines = [
        "import torch",
        "from torch import nn",
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper",
    ]
    if sharded:
        lines += [
            "from torch.distributed.device_mesh import init_device_mesh",
            "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        ]
    else:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    return "\n".join(lines) + "\n"


def _policy(plan: Plan) -> str:
    if plan.precision == "fp32":
        return "MixedPrecisionPolicy()"
    reduce = {"fp32": "torch.float32", **DTYPES}[plan.gradient_reduction.dtype]
    return f"MixedPrecisionPolicy(param_dtype={DTYPES[plan.precision]}, reduce_dtype={reduce})"


def _names(names: tuple[str, ...] | list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _left(plan: Plan, layers: tuple[str, ...]) -> list[str]:
    mesh, left = plan.mesh, list[str]()
    for axis in ("pp", "tp", "cp", "ep"):
        if getattr(mesh, axis) > 1:
            left.append(f"{axis}={getattr(mesh, axis)}: apply() only shards and replicates data")
    sharded = plan.zero_stage > 0 and mesh.dp_shard > 1
    if plan.zero_stage == 1 and sharded:
        left.append("zero_stage 1: FSDP divides gradients too, as in stage 2")
    if not sharded and plan.precision != "fp32":
        left.append(f"precision {plan.precision}: run the forward pass under torch.autocast")
    if plan.precision == "fp8":
        left.append("precision fp8: torch has no policy for it; bf16 is used")
    if any(b.recompute == "selective" for b in plan.blocks):
        left.append("selective recomputation: pass a context_fn to checkpoint_wrapper")
    other = [b.name for b in plan.blocks if b.recompute == "full" and b.name not in layers]
    if other:
        left.append(f"recompute of {', '.join(other)}: these blocks need not be modules")
    if plan.offload != "none":
        left.append(f"offload {plan.offload}")
    if plan.compile != "none":
        left.append(f"compile {plan.compile}: call torch.compile after apply()")
    left.append(f"seed {plan.seed}: call torch.manual_seed")
    return left
