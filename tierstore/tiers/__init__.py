"""The device tier: where computation reads weights and leaves gradients."""

from tierstore.tiers.device import DeviceSlots, DeviceTier, HostDeviceTier
from tierstore.tiers.opening import open_device_tier

__all__ = ["DeviceSlots", "DeviceTier", "HostDeviceTier", "open_device_tier"]
