"""Choosing the device tier."""

from __future__ import annotations

import torch

from tierstore._native import Engine, HugePages
from tierstore.capabilities import Capability, Finding, Resolution, resolve
from tierstore.links import LinkConfig
from tierstore.tiers.device import DeviceTier, HostDeviceTier, WeightLoads
from tierstore.tiers.slots import DeviceSlots


def open_device_tier(
    engine: Engine,
    slots: DeviceSlots[torch.dtype],
    device: torch.device,
    huge_pages: HugePages,
    loads: WeightLoads = WeightLoads.COPIED,
) -> DeviceTier:
    """The tier for ``device``; ``loads`` is for the CPU. Raises OSError or torch's OutOfMemoryError when the slots do not
    fit.
    """
    if device.type == "cuda":
        from tierstore.tiers.cuda import CudaDeviceTier

        return CudaDeviceTier(engine, slots, device, huge_pages)
    return HostDeviceTier(engine, slots, huge_pages, loads)


def weights_in_place(setting: Capability, device: torch.device, link: LinkConfig) -> Resolution:
    """Whether experts are computed with where they lie in the host cache. Raises CapabilityError for ON where they
    cannot be.
    """

    def probe() -> Finding:
        if device.type != "cpu":
            return Finding(False, f"{device} has memory of its own")
        if link.on:
            return Finding(False, "copies are to take the time of a limited link")
        return Finding(True, "the CPU computes")

    return resolve("weights_in_place", setting, probe)


def describe_weights(resolution: Resolution) -> str:
    """What ``weights_in_place`` found, as one line."""
    how = "computed with in the host cache" if resolution else "copied to slots of the device"
    return f"expert weights: {how} ({resolution.reason})"
