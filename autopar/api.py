"""The public functions: load, capture, search, estimate and parallelize in a person's own program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.hardware.cluster import Cluster
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.cost.estimate import Estimate
    from autopar.model.graph import OpGraph
    from autopar.model.spec import TrainingJob
    from autopar.runtime.parallelize import ParallelModel


def load(source: str | Path) -> TrainingJob:
    """Loads a model: a ``model.py`` file, or ``hf:PATH`` for a Hugging Face ``config.json``.

    Raises:
        ModelError: the file is missing, lacks ``build_model`` or ``example_batch``, or fails.
    """
    from autopar.model.spec import load as load_job

    return load_job(str(source))


def capture(job: TrainingJob, batch_size: int) -> OpGraph:
    """Captures the model, forward to loss, as an operator graph for one micro-batch size; allocates no weights.

    Raises:
        CaptureError: the model cannot be captured; names the module and the source line.
    """
    from autopar.model.capture import capture as capture_graph

    return capture_graph(job, batch_size)


def search(
    job: TrainingJob,
    cluster: Cluster | str | Path,
    *,
    global_batch: int,
    precision: str = "fp32",
    pins: Mapping[str, Any] | None = None,
    time_limit_s: float | None = None,
) -> Plan:
    """The best plan to train a model on a cluster.

    Args:
        job: from :func:`load`.
        cluster: a Cluster, or the name or path of one.
        global_batch: samples per optimizer step, over all devices.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp8``.
        pins: choices to keep, such as ``{"tp": 4}``.
        time_limit_s: stop searching after so many seconds and take the best so far.

    Returns:
        The plan, with its ``estimate`` and its proven ``optimality_gap``.

    Raises:
        InputError: a pin or the batch contradicts the cluster.
        NoPlanFits: nothing fits in memory.
    """
    from autopar.planner.planner import search as search_plans

    found = search_plans(
        job,
        as_cluster(cluster),
        global_batch,
        precision=precision,
        pins=dict(pins or {}),
        top=1,
        time_limit_s=time_limit_s,
    )
    return found.plans[0]


def estimate(job: TrainingJob, plan: Plan, cluster: Cluster | str | Path) -> Estimate:
    """Predicts step time and memory of a plan.

    Raises:
        PlanError: the plan does not belong to the model or the cluster.
    """
    from autopar.cost.estimate import estimate as estimate_plan

    return estimate_plan(job, plan, as_cluster(cluster))


def parallelize(job: TrainingJob, plan: Plan) -> ParallelModel:
    """Makes this process's part of the planned model, for a loop of one's own; call it in every process.

    The processes must have been started (by ``torchrun`` or ``autopar run``); the process group is made when there
    is none yet. The result has ``step(batch) -> loss``, ``state_dict()``, ``load_state_dict()`` and
    ``named_parameters()``.

    Raises:
        PlanError: the plan does not belong to the model or needs another number of processes.
    """
    from autopar.runtime.parallelize import parallelize as make_parallel
    from autopar.runtime.processes import join

    join()
    return make_parallel(job, plan)


def as_cluster(cluster: Cluster | str | Path) -> Cluster:
    """A Cluster as it is, or loaded by name or path."""
    return cluster if isinstance(cluster, Cluster) else Cluster.load(str(cluster))
