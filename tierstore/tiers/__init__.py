"""The device tier: computation reads weights from it and writes gradients to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.tiers.device import (
        DeviceTier,
        HostDeviceTier,
        LimitedTier,
        WeightLoads,
        describe_weights,
        limited_tier,
        open_device_tier,
        weights_in_place,
    )
    from tierstore.tiers.slots import DeviceSlots
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
