"""Mixture of experts: router, dispatch, experts, and where they come from."""

from __future__ import annotations

from tierstore.moe.experts import Activation, ExpertShape, initial_expert
from tierstore.moe.layer import FeedForward, MoELayer, SaveActivations
from tierstore.moe.router import NoiseKey, Router, RouterConfig, RouterNoise, Routing
from tierstore.moe.source import ExpertLease, ExpertSource, InMemoryExperts, MemoryLease

__all__ = [
    "Activation",
    "ExpertLease",
    "ExpertShape",
    "ExpertSource",
    "FeedForward",
    "InMemoryExperts",
    "MemoryLease",
    "MoELayer",
    "NoiseKey",
    "Router",
    "RouterConfig",
    "RouterNoise",
    "Routing",
    "SaveActivations",
    "initial_expert",
]
