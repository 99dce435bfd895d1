"""Choosing the device tier."""

from __future__ import annotations

import torch

from tierstore._native import Engine, HugePages
from tierstore.tiers.device import DeviceTier, HostDeviceTier
from tierstore.tiers.slots import DeviceSlots


def open_device_tier(
    engine: Engine, slots: DeviceSlots[torch.dtype], device: torch.device, huge_pages: HugePages
) -> DeviceTier:
    """The tier for ``device``. Raises OSError or torch's OutOfMemoryError when the slots do not fit."""
    if device.type == "cuda":
        from tierstore.tiers.cuda import CudaDeviceTier

        return CudaDeviceTier(engine, slots, device, huge_pages)
    return HostDeviceTier(engine, slots, huge_pages)
