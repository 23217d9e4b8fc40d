"""Subject: a plan with the model, cluster and engine that price it; what every explanation and plot starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autopar.cost.engine import Engine
from autopar.cost.estimate import Estimate, engine_for
from autopar.hardware.cluster import Cluster
from autopar.model.graph import OpGraph
from autopar.model.spec import TrainingJob, load
from autopar.plan import Plan


@dataclass(frozen=True)
class Subject:
    """A plan that has just been estimated.

    Attributes:
        name: what tables and titles call it.
        engine: that priced it; keeps the captured model at every micro-batch size asked for.
    """

    name: str
    plan: Plan
    cluster: Cluster
    engine: Engine
    estimate: Estimate

    @property
    def graph(self) -> OpGraph:
        """The model at the plan's micro-batch size."""
        return self.engine.graph(self.plan.micro_batch)

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second over all devices."""
        return self.estimate.tokens / self.estimate.step_time_s


def subject(job: TrainingJob, plan: Plan, cluster: Cluster, name: str = "plan") -> Subject:
    """Estimates a plan for a job on a cluster.

    Raises:
        PlanError: the plan was made for another model, or needs more devices than the cluster has.
    """
    engine = engine_for(job, plan, cluster)
    return Subject(name, plan, cluster, engine, engine.estimate(plan))


def load_subject(
    path: Path,
    model: str | None = None,
    cluster: str | None = None,
    attach: Callable[[str], Cluster] = Cluster.load,
) -> Subject:
    """Reads a plan file and estimates it; model and cluster are the plan's own unless named.

    Args:
        attach: loads a cluster by name or path, with a measured profile if there is one.

    Raises:
        PlanError, ModelError, ProfileError: the plan, its model or its cluster cannot be read, or do not match.
    """
    plan = Plan.load(path)
    source = plan.cluster.source if plan.cluster.source and Path(plan.cluster.source).is_file() else plan.cluster.name
    return subject(load(model or plan.model.source), plan, attach(cluster or source), path.stem)
