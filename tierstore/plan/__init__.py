"""Planning: bytes of a run on each tier, whether it fits, time of a step. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.decision import Decision as Decision
    from tierstore.machine_profile import ASSUMED as ASSUMED
    from tierstore.machine_profile import Cost as Cost
    from tierstore.machine_profile import Evidence as Evidence
    from tierstore.machine_profile import Profile as Profile
    from tierstore.machine_profile import find_profile as find_profile
    from tierstore.machine_profile import load_profile as load_profile
    from tierstore.machine_profile import save_profile as save_profile
    from tierstore.plan.capacity import Capacity as Capacity
    from tierstore.plan.capacity import Term as Term
    from tierstore.plan.capacity import Use as Use
    from tierstore.plan.fitting import Change as Change
    from tierstore.plan.fitting import Effect as Effect
    from tierstore.plan.fitting import Hardware as Hardware
    from tierstore.plan.fitting import Limits as Limits
    from tierstore.plan.fitting import Remedy as Remedy
    from tierstore.plan.fitting import Shortfall as Shortfall
    from tierstore.plan.fitting import Verdict as Verdict
    from tierstore.plan.order import OrderCost as OrderCost
    from tierstore.plan.order import choose_order as choose_order
    from tierstore.plan.predict import Prediction as Prediction
    from tierstore.plan.presets import PRESETS as PRESETS
    from tierstore.plan.presets import Preset as Preset
    from tierstore.plan.presets import find_preset as find_preset
    from tierstore.plan.report import Plan as Plan
    from tierstore.plan.report import machine_limits as machine_limits
    from tierstore.plan.report import plan_run as plan_run
    from tierstore.stats import Tier as Tier
    from tierstore.tiers.slots import DeviceKind as DeviceKind
    from tierstore.train import TrainConfig as TrainConfig
    from tierstore.train.files import MicroOrder as MicroOrder
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
