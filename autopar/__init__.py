"""autopar: finds, proves and runs the best way to train a PyTorch model in parallel.

    job = autopar.load("model.py")
    plan = autopar.search(job, "local-cpu-2", global_batch=16)
    print(autopar.estimate(job, plan, "local-cpu-2").step_time_s)

In each process of a distributed run::

    model = autopar.parallelize(job, plan)
    loss = model.step(batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar import errors
from autopar.errors import (
    AutoparError,
    CaptureError,
    InputError,
    ModelError,
    NoPlanFits,
    PlanError,
    ProfileError,
    RunError,
)
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.api import capture, estimate, load, parallelize, search
    from autopar.hardware.cluster import Cluster

__version__ = "0.1.0"
__all__ = [
    "AutoparError",
    "CaptureError",
    "Cluster",
    "InputError",
    "ModelError",
    "NoPlanFits",
    "Plan",
    "PlanError",
    "ProfileError",
    "RunError",
    "capture",
    "errors",
    "estimate",
    "load",
    "parallelize",
    "search",
]


def __getattr__(name: str) -> Any:
    """Loads the functions on first use, so that ``import autopar`` and ``autopar --help`` stay quick."""
    if name not in __all__:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    from autopar import api
    from autopar.hardware import cluster

    value = cluster.Cluster if name == "Cluster" else getattr(api, name)
    globals()[name] = value
    return value
