"""Plans in the words of other trainers; what a trainer cannot be told is named, never dropped in silence."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autopar.errors import InputError, ProfileError
from autopar.export.exported import Exported, Machines

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster
    from autopar.plan import Plan

TARGETS = ("torchtitan", "megatron", "deepspeed", "fsdp", "accelerate", "slurm")


def export(plan: Plan, target: str, devices_per_node: int | None = None) -> Exported:
    """A plan as a settings file of another trainer.

    Args:
        target: one of :data:`TARGETS`.
        devices_per_node: unset, that of the plan's cluster.

    Raises:
        InputError: the target is unknown, or the devices are not whole nodes.
    """
    if target not in TARGETS:
        raise InputError(f"--to {target!r} is unknown", f"Use one of {', '.join(TARGETS)}")
    made: Exported = import_module(f"autopar.export.{target}").export(plan, machines_of(plan, devices_per_node))
    return made


def machines_of(plan: Plan, devices_per_node: int | None = None) -> Machines:
    """Nodes and devices on each.

    Raises:
        InputError: the cluster is not known here and ``devices_per_node`` is not given, or it does not divide.
    """
    devices, cluster = plan.cluster.devices, _known(plan)
    if devices_per_node is None and cluster is None:
        raise InputError(f"the plan's cluster {plan.cluster.name!r} is not known here", "Give --devices-per-node")
    per_node = devices_per_node or (cluster.devices_per_node if cluster else 0)
    if per_node < devices and devices % per_node:
        raise InputError(
            f"--devices-per-node {per_node} does not divide the plan's {devices} devices", "Give a divisor"
        )
    return Machines(max(1, devices // per_node), min(per_node, devices), cluster.device.kind if cluster else "gpu")


def _known(plan: Plan) -> Cluster | None:
    from autopar.hardware.cluster import Cluster

    for name in (plan.cluster.source, plan.cluster.name):
        try:
            if name:
                return Cluster.load(name)
        except ProfileError:
            continue
    return None
