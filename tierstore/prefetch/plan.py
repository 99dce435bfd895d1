"""Configuration of prefetch, and when expert gradients are stepped."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tierstore._native import GroupOrder
from tierstore.config import check_least, key
from tierstore.errors import ConfigError
from tierstore.prefetch.predictor import PredictorName


class StepTiming(Enum):
    """When a complete expert gradient is stepped.

    ``IMMEDIATE``: during the backward pass, as soon as it is complete. ``DEFERRED``: when the gradient norm of the whole
    model is known (clipping); until then it is kept in the host cache, and spills to disk if it does not fit.
    """

    IMMEDIATE = "immediate"
    DEFERRED = "deferred"


def group_order(*, replicas: int, chunks: int) -> GroupOrder:
    """The order in which a store divides accesses into groups, for ``replicas`` copies of each expert and at most ``chunks``
    chunks of rows.

    Gradients are summed over replicas one after another, so all replicas must reach the same experts in the same order,
    whatever each has in memory. Chunks arrive in ascending order of experts, so with several of them the first experts of
    the layer can be computed first.
    """
    return GroupOrder.RESIDENT_FIRST if replicas == chunks == 1 else GroupOrder.KEY


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """How far ahead experts are fetched. Affects waiting times, never results."""

    depth: int = key(1, "layer passes to look ahead (0: none)")
    gather_depth: int = key(1, "passes to gather dense parameters ahead (0: none)")
    budget: float = key(0.45, "share of the cache that speculation may hold")
    predictor: PredictorName = key(PredictorName.HISTORY, "predictor of forward passes' experts")
    guesses: int = key(
        0,
        "most guessed experts of a layer (0: all likely ones; in serving by router, 3 x top_k)",
    )

    def __post_init__(self) -> None:
        check_least(self, 0, "depth", "gather_depth", "guesses", table="prefetch.")
        if not 0 <= self.budget <= 0.9:
            raise ConfigError(f"prefetch.budget: expected a share from 0 to 0.9, got {self.budget}")
