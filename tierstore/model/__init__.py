"""The model interface, and the built-in model: a decoder transformer with MoE layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.lazy import exports

if TYPE_CHECKING:
    from tierstore.model.config import CheckpointActivations, ComputeDtype, ModelConfig, TieEmbeddings
    from tierstore.model.interface import Batch, Model, ModelOutput
    from tierstore.model.spec import ModelSpec
    from tierstore.model.transformer import Transformer
else:
    __all__, __getattr__, __dir__ = exports(__name__, __file__)
