"""From an opened model to forward passes with a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.model.transformer import Transformer
from tierstore.serve.model.builtin import BuiltInModel
from tierstore.serve.model.interface import ServedModel

if TYPE_CHECKING:
    from tierstore.model.interface import Model


def served_model(model: Model, *, context: int = 0) -> ServedModel:
    """``model``, which is in evaluation, as batches see it. Raises ConfigError for a ``context`` beyond the model's."""
    if isinstance(model, Transformer):
        return BuiltInModel(model, context=context)
    from tierstore.serve.model.wrapped import WrappedModel

    return WrappedModel(model.module, context=context)
