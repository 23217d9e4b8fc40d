"""Measures operators, collectives and memory on the devices that a plan will run on.

How: as many processes as the cluster has devices on one node run at the same time, each with its share of the cores,
so that they compete for memory and caches as in training. An operator is called at the local shapes that the search
needs, forward and backward apart, warmed up, and timed until a window of time has passed; the lower quartile counts,
for other programs only ever add time. Collectives run between the same processes, all groups of a size at once, each
after a stretch of compute. Results are written as they come, so that an interrupted measurement can be taken up again.
"""

from autopar.profiler.profile import (
    default_path,
    fingerprint,
    profile_collectives,
    profile_device,
    profile_model,
    threads_per_process,
    usable,
)

__all__ = [
    "default_path",
    "fingerprint",
    "profile_collectives",
    "profile_device",
    "profile_model",
    "threads_per_process",
    "usable",
]
