"""Planning: the bytes of a run on each tier, whether it fits, and the time of a step. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.decision import Decision
    from tierstore.machine_profile import (
        ASSUMED,
        Cost,
        Evidence,
        Profile,
        find_profile,
        load_profile,
        save_profile,
    )
    from tierstore.plan.capacity import Capacity, Term, Use
    from tierstore.plan.fitting import Change, Effect, Hardware, Limits, Remedy, Shortfall, Verdict
    from tierstore.plan.order import OrderCost, choose_order
    from tierstore.plan.predict import Prediction
    from tierstore.plan.presets import PRESETS, Preset, find_preset
    from tierstore.plan.report import Plan, machine_limits, plan_run
    from tierstore.stats import Tier
    from tierstore.tiers.slots import DeviceKind
    from tierstore.train import TrainConfig
    from tierstore.train.files import MicroOrder
else:
    __getattr__, __dir__ = exports(__name__, __file__)

__all__ = [
    "ASSUMED",
    "PRESETS",
    "Capacity",
    "Change",
    "Cost",
    "Decision",
    "DeviceKind",
    "Effect",
    "Evidence",
    "Hardware",
    "Limits",
    "MicroOrder",
    "OrderCost",
    "Plan",
    "Prediction",
    "Preset",
    "Profile",
    "Remedy",
    "Shortfall",
    "Term",
    "Tier",
    "TrainConfig",
    "Use",
    "Verdict",
    "choose_order",
    "find_preset",
    "find_profile",
    "load_profile",
    "machine_limits",
    "plan_run",
    "save_profile",
]
