"""What the next layers need, and bringing it in time: the expert source that the trainer uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.prefetch.experts import TieredExperts
    from tierstore.prefetch.passes import Pass, PassSequence
    from tierstore.prefetch.plan import GradientPlan, PrefetchConfig
    from tierstore.prefetch.predictor import Predictor, PredictorName, make_predictor
else:
    __getattr__ = exports(
        __name__,
        {
            "experts": ["TieredExperts"],
            "passes": ["Pass", "PassSequence"],
            "plan": ["GradientPlan", "PrefetchConfig"],
            "predictor": ["Predictor", "PredictorName", "make_predictor"],
        },
    )

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
