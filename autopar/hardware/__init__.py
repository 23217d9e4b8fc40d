"""What is trained on: devices, clusters, and what was measured on them."""

from autopar.hardware.cluster import Cluster, Link
from autopar.hardware.device import Device
from autopar.hardware.profiles import Profile
from autopar.hardware.topology import Group, group_of

__all__ = ["Cluster", "Device", "Group", "Link", "Profile", "group_of"]
