"""A user's present settings as a plan: what they say is kept, what they leave open is chosen as the search would."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

from pydantic import ValidationError

from autopar.cost.engine import Engine
from autopar.errors import InputError, NoPlanFits, PlanError
from autopar.export.layers import Stack, stack_of
from autopar.export.settings import Settings
from autopar.hardware.cluster import Cluster
from autopar.model.capture import capture
from autopar.model.spec import TrainingJob
from autopar.plan import Plan, first_fault
from autopar.planner.candidate import Evaluator
from autopar.planner.planner import Progress, search
from autopar.planner.space import Candidate, check_pins, check_settings


def plan_of(settings: Settings, job: TrainingJob, cluster: Cluster, global_batch: int) -> Plan:
    """The plan that settings come down to, with its estimate; placements of operators are the best ones for its mesh.

    It is priced as autopar's own runtime would run it, and may need more memory than there is.

    Raises:
        InputError: settings and cluster or batch do not go together.
        PlanError: the settings contradict each other or the model.
    """
    mesh = settings.mesh_on(cluster.devices)
    check_settings(global_batch, settings.precision, 1, cluster)
    sizes = {axis: n for axis, n in mesh.model_dump().items() if axis != "ep" or n > 1}
    pins: dict[str, Any] = {**sizes, "micro_batch": settings.micro_batch}
    if settings.schedule in ("gpipe", "1f1b"):
        pins["schedule"] = settings.schedule
    checked = check_pins(pins, cluster.devices, global_batch)
    count = global_batch // mesh.dp // settings.micro_batch
    engine = Engine(lambda batch: capture(job, batch, cluster.device.kind), cluster, settings.precision)
    evaluator = Evaluator(engine, job, global_batch)
    found = list(evaluator.plans(Candidate(mesh, settings.micro_batch, count), checked, math.inf))
    if not found:
        raise InputError(
            f"schedule {settings.schedule} cannot run {count} micro-batches on {mesh.pp} stages",
            "Give more micro-batches than stages",
        )
    best = min(found, key=lambda priced: (max(priced.excess_bytes, 0), priced.seconds)).plan
    plan = _as_said(best, settings)
    return plan.model_copy(update={"estimate": engine.estimate(plan).to_json()})


def with_faster(
    own: Plan, job: TrainingJob, cluster: Cluster, global_batch: int, precision: str, progress: Progress
) -> list[Plan]:
    """The best plans of a search without pins; none where nothing fits.

    Args:
        own: what the user has; ranked with the others where none of them is faster.
    """
    try:
        found = search(job, cluster, global_batch, precision, top=3, progress=progress).plans
    except NoPlanFits:
        return [own] if own.estimate["fits"] else []
    faster = [p for p in found if p.estimate["step_time_s"] < own.estimate["step_time_s"]]
    return faster or ([own] if own.estimate["fits"] else found)


def _as_said(plan: Plan, settings: Settings) -> Plan:
    """The plan with stages, recomputation, schedule and sharding as the settings say."""
    data = plan.model_dump()
    data["zero_stage"] = settings.zero_stage if plan.mesh.dp > 1 else 0
    data["schedule"], data["virtual_stages"] = settings.schedule, settings.virtual_stages
    stack = stack_of(plan)
    data["stages"] = _stages(plan, stack, settings)
    try:
        cut = Plan.model_validate(data)
        again = _recomputed(cut, settings.recompute_first)
        for block in data["blocks"]:
            block["recompute"] = settings.recompute if block["name"] in again else "none"
        return Plan.model_validate(data)
    except ValidationError as error:
        raise PlanError(f"the {settings.trainer} settings make no plan: {first_fault(error)}") from None


def _stages(plan: Plan, stack: Stack, settings: Settings) -> list[str]:
    """The first block of every stage."""
    want = plan.mesh.pp * settings.virtual_stages
    if not settings.layers and want == len(plan.stages):
        return plan.stages
    total = len(stack.names)
    counts = settings.layers or tuple(total * (i + 1) // want - total * i // want for i in range(want))
    if sum(counts) != total or not stack.single or 0 in counts[1:-1]:
        raise InputError(
            f"{settings.trainer} settings cut {sum(counts)} layers into {len(counts)} stages, the model has {total}",
            "Give the settings of this model",
        )
    after = [b.name for b in plan.blocks][[b.name for b in plan.blocks].index(stack.names[-1]) + 1 :]
    starts = [*stack.names, *after[:1]]
    return [plan.blocks[0].name, *(starts[at] for at in accumulate(counts[:-1]))]


def _recomputed(plan: Plan, first: int | None) -> set[str]:
    """Names of the layers that are recomputed: all, or the first ones of each stage."""
    stack = stack_of(plan)
    if not stack.names:
        return {b.name for b in plan.blocks}
    return {stack.names[i] for stage in stack.stages for i in stage[:first]}
