"""The disks under a directory, and how they say they are."""

from tierstore.devices.blocks import Disk, disks_under
from tierstore.devices.health import Health, disk_health

__all__ = ["Disk", "Health", "disk_health", "disks_under"]
