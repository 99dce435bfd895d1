"""Prefetch of what the next layers need, and the expert source that the trainer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.prefetch.experts import TieredExperts
    from tierstore.prefetch.horizontal import DenseUnits, HorizontalQueue
    from tierstore.prefetch.plan import PrefetchConfig, StepTiming
    from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor
    from tierstore.prefetch.schedule import Pass, QueueLimits, Schedule, Unit, unit_schedule
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
