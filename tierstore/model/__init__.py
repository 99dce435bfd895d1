"""The built-in decoder transformer with MoE layers."""

from __future__ import annotations

from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig, TieEmbeddings
from tierstore.model.transformer import Output, Transformer

__all__ = [
    "CheckpointActivations",
    "ComputeDtype",
    "ModelConfig",
    "Output",
    "TieEmbeddings",
    "Transformer",
]
