"""Mixture of experts: router, dispatch, experts, and where they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.moe.config import Activation, ExpertShape, RouterConfig, RouterNoise, SaveActivations
    from tierstore.moe.experts import initial_expert
    from tierstore.moe.layer import FeedForward, MoELayer
    from tierstore.moe.router import NoiseKey, Router, Routing
    from tierstore.moe.source import ExpertLease, ExpertSource, InMemoryExperts
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
