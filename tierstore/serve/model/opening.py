"""From an opened model to forward passes with a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tierstore.hf.experts import bound
from tierstore.model.transformer import Transformer
from tierstore.moe import MoELayer
from tierstore.moe.source import ExpertSource, SourceSlot
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


def source_slot(module: nn.Module) -> SourceSlot:
    """The slot that all experts of ``module`` are leased through, where several passes can meet."""
    found: set[ExpertSource] = set()
    for each in module.modules():
        if isinstance(each, MoELayer):
            found.add(each.source)
        elif (layer := bound(each)) is not None:
            found.add(layer.source)
    if len(found) != 1:
        raise ValueError(f"expected one source of experts, found {len(found)}")
    (slot,) = found
    if not isinstance(slot, SourceSlot):
        raise ValueError(f"expected experts behind a SourceSlot, found {type(slot).__name__}")
    return slot
