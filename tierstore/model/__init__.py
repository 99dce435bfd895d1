"""The built-in decoder transformer with MoE layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig, TieEmbeddings
    from tierstore.model.transformer import ModelOutput, Transformer
else:
    __getattr__, __dir__ = exports(__name__, __file__)
