"""The device tier: where computation reads weights and leaves gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.tiers.device import DeviceTier, HostDeviceTier, WeightLoads
    from tierstore.tiers.limited import LimitedTier, limited_tier
    from tierstore.tiers.opening import describe_weights, open_device_tier, weights_in_place
    from tierstore.tiers.slots import DeviceSlots
else:
    __getattr__, __dir__ = exports(__name__, __file__)
