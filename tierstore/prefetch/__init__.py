"""What the next layers need, and bringing it in time: the expert source that the trainer uses."""

from tierstore.prefetch.experts import TieredExperts
from tierstore.prefetch.horizontal import DenseUnits, HorizontalQueue
from tierstore.prefetch.plan import GradientPlan, PrefetchConfig
from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor
from tierstore.prefetch.schedule import Pass, QueueLimits, Reshard, Schedule, Unit

__all__ = [
    "DenseUnits",
    "GradientPlan",
    "HorizontalQueue",
    "Pass",
    "Predictor",
    "PredictorName",
    "PrefetchConfig",
    "QueueLimits",
    "Reshard",
    "Schedule",
    "TieredExperts",
    "Unit",
    "make_predictor",
]
