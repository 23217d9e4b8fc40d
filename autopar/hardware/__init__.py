"""What is trained on: devices, clusters, and what was measured on them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.hardware.cluster import Cluster, Link
    from autopar.hardware.device import Device
    from autopar.hardware.profiles import Profile
    from autopar.hardware.topology import Group, group_of

__all__ = ["Cluster", "Device", "Group", "Link", "Profile", "group_of"]
_HOMES = {
    "Cluster": "cluster",
    "Device": "device",
    "Group": "topology",
    "Link": "cluster",
    "Profile": "profiles",
    "group_of": "topology",
}


def __getattr__(name: str) -> Any:
    """Loads the classes on first use: shell completion lists clusters without waiting for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar.hardware' has no attribute {name!r}")
    value = getattr(import_module(f"autopar.hardware.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
