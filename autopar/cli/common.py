"""What several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster


def load_cluster(name: str, profile: Path | None) -> Cluster:
    """A cluster, with a measured profile if one is named; says so on stderr where it was measured elsewhere.

    Raises:
        ProfileError: either does not exist, has a wrong field, or they do not belong together.
    """
    from autopar.hardware.cluster import Cluster
    from autopar.hardware.profiles import Profile

    cluster = Cluster.load(name)
    if profile is None:
        return cluster
    measured = Profile.load(profile)
    if cluster.device.kind == "cpu":
        from autopar.profiler import fingerprint

        why = measured.foreign(fingerprint(cluster))
        if why:
            typer.echo(f"note: {profile} was not measured here: {why}", err=True)
    return cluster.with_profile(measured)
