"""What the next layers need, and bringing it in time: the expert source that the trainer uses."""

from tierstore.prefetch.experts import TieredExperts
from tierstore.prefetch.passes import Pass, PassSequence
from tierstore.prefetch.plan import GradientPlan, PrefetchConfig
from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor

__all__ = [
    "GradientPlan",
    "Pass",
    "PassSequence",
    "Predictor",
    "PredictorName",
    "PrefetchConfig",
    "TieredExperts",
    "make_predictor",
]
