"""The interface of served models: forward passes over new tokens, with a cache of keys and values of earlier tokens.

Shapes: B sequences, T tokens of this pass, S tokens including the cached ones, V vocabulary, H heads, C width of a head.

A batch is padded on the left, so the last column has the last token of every sequence. Cached keys include their positions,
so columns of padding can be inserted before them and removed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.hf.describing import cached_positions
from tierstore.hf.experts import bound, experts_modules
from tierstore.model.attention import KeyValueCache
from tierstore.model.interface import Model
from tierstore.model.transformer import Transformer
from tierstore.moe import MoELayer, NoiseKey


class LayeredCache(Protocol):
    """A model's cache of earlier tokens: transformers' ``DynamicCache``, or the built-in model's.

    A layer of attention has ``keys`` and ``values`` (B, heads, S, width) after its first pass.
    """

    layers: Any


class ServedModel(Protocol):
    """A model in evaluation mode whose experts are leased. One thread, one pass at a time."""

    #: The most tokens of a sequence.
    context: int
    #: V, the number of token ids.
    vocabulary: int
    #: Pads the shorter sequences of a batch on the left; masked in attention.
    pad_token: int

    def new_cache(self) -> LayeredCache:
        """An empty cache, for any number of sequences."""
        ...

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        """Compute the fp32 logits (B, V) that follow ``tokens_BT``, and add the tokens to ``cache``.

        ``mask_BS``: 1 for a token, 0 for padding; ``positions_BT``: the position of each token in its sequence.
        """
        ...

    def forward_empty(self) -> Tensor:
        """A pass without tokens, on several ranks: the layers' exchanges alone. Returns an empty tensor."""
        ...


class BuiltInModel:
    """The built-in model as a ``ServedModel``. ``context`` 0: the length that it was trained with.

    Raises ConfigError for a longer context.
    """

    def __init__(self, model: Transformer, *, context: int = 0) -> None:
        self._model = model
        self.context = checked_context(context, model.config.seq_len)
        self.vocabulary = model.config.vocab_size
        self.pad_token = 0

    def new_cache(self) -> LayeredCache:
        return KeyValueCache.of(len(self._model.blocks))

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        return self._model.follow(tokens_BT, cast(KeyValueCache, cache), mask_BS, positions_BT)

    def forward_empty(self) -> Tensor:
        config = self._model.config
        x_0D = self._model.embedding.new_empty(0, config.d_model, dtype=config.compute_dtype.torch)
        for block in self._model.blocks:
            if isinstance(block.mixture, MoELayer):
                block.mixture(x_0D, NoiseKey())
        return x_0D


class WrappedModel:
    """A model of transformers as a ``ServedModel``. ``context`` 0: the model's own limit.

    Raises ConfigError for a longer context.
    """

    def __init__(self, module: nn.Module, *, context: int = 0) -> None:
        from transformers import DynamicCache

        wrapped: Any = module
        # requires_grad decides whether torch computes one product or one for each sequence, which round differently. It is
        # set as in a model that transformers loads; passes run in inference mode, without gradients.
        module.requires_grad_(True)
        self._module = module
        config: Any = wrapped.config.get_text_config(decoder=True)
        self.new_cache = partial(DynamicCache, config=wrapped.config)
        self.context = checked_context(context, cached_positions(config.to_dict()))
        self.vocabulary: int = config.vocab_size
        self.pad_token = _pad_token(config)
        self._options: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if wrapped._supports_logits_to_keep():
            self._options["logits_to_keep"] = 1

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        output = self._module(
            input_ids=tokens_BT,
            attention_mask=mask_BS,
            position_ids=positions_BT,
            past_key_values=cache,
            **self._options,
        )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    def forward_empty(self) -> Tensor:
        wrapped: Any = self._module
        table: Tensor = wrapped.get_input_embeddings().weight
        for _, module in experts_modules(self._module):
            layer = bound(module)
            assert layer is not None
            x_0D = table.new_empty(0, layer.shape.d_model)
            layer(x_0D, table.new_empty(0, 1, dtype=torch.int64), x_0D.new_empty(0, 1))
        return table.new_empty(0)


def _pad_token(config: Any) -> int:
    """The model's pad token, else its end of text, as in ``generate``, else 0. Ids outside the vocabulary are ignored."""
    for name in ("pad_token_id", "eos_token_id"):
        found = getattr(config, name, None)
        for token in found if isinstance(found, list) else [found]:
            if token is not None and 0 <= token < config.vocab_size:
                return int(token)
    return 0


def checked_context(asked: int, most: int) -> int:
    """``asked``, or the model's limit ``most`` if it is 0. Raises ConfigError if ``asked`` is more."""
    if asked > most:
        raise ConfigError(f"batch.context: expected at most {most}, the model's own limit, got {asked}")
    return asked or most


def served_model(model: Model, *, context: int = 0) -> ServedModel:
    """``model``, in evaluation mode, as a ``ServedModel``. Raises ConfigError for a ``context`` beyond the model's limit."""
    if isinstance(model, Transformer):
        return BuiltInModel(model, context=context)

    return WrappedModel(model.module, context=context)


#: Cache layers that hold the keys and values of every token and nothing else.
_PLAIN = ("DynamicLayer", "LayerKeyValues")
#: Attributes in which layers of linear attention keep their states, (B, ...) each.
_STATES = ("conv_states", "recurrent_states")


def why_apart(cache: LayeredCache) -> str:
    """Why batches with caches like this one cannot be merged; empty if they can.

    A sliding window keeps only the last columns, and a state of linear attention depends on the padding of its batch.
    """
    others = sorted({type(layer).__name__ for layer in cache.layers} - set(_PLAIN))
    return f"caches of {', '.join(others)} cannot be padded again" if others else ""


def select_rows(cache: LayeredCache, rows: Sequence[int]) -> None:
    """Keep only the sequences ``rows``, in this order."""

    def kept(value: Tensor) -> Tensor:
        return value.index_select(0, torch.tensor(rows, device=value.device))

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = kept(layer.keys), kept(layer.values)
        for name in _STATES:
            states: dict[int, Tensor | None] = getattr(layer, name, {})
            states.update({key: kept(value) for key, value in states.items() if value is not None})


def copied_rows(cache: LayeredCache, rows: Sequence[int]) -> LayeredCache:
    """A copy of ``cache`` with only the sequences ``rows``; ``cache`` is unchanged."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name in _STATES:
            if hasattr(layer, name):
                setattr(layer, name, dict(getattr(layer, name)))
    select_rows(made, rows)
    return made


def drop_columns(cache: LayeredCache, columns: int) -> None:
    """Remove the first ``columns`` columns (padding) of every sequence. Only for caches that ``why_apart`` allows."""
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, columns:].contiguous()
        layer.values = layer.values[:, :, columns:].contiguous()


def move(caches: Sequence[LayeredCache], into: LayeredCache, padding: Sequence[int]) -> None:
    """Move all sequences of ``caches`` to the empty cache ``into``; ``padding``: columns to insert before each cache.

    Each layer is freed once it is moved, so only one layer at a time exists twice.
    """
    for number, layer in enumerate(into.layers):
        parts = [cache.layers[number] for cache in caches]
        layer.update(
            _side_by_side([part.keys for part in parts], padding),
            _side_by_side([part.values for part in parts], padding),
        )
        for part in parts:
            part.keys = part.values = None


def _side_by_side(parts_BHSC: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
    first = parts_BHSC[0]
    rows = sum(part.shape[0] for part in parts_BHSC)
    made = first.new_zeros(rows, first.shape[1], first.shape[2] + padding[0], first.shape[3])
    row = 0
    for part, columns in zip(parts_BHSC, padding, strict=True):
        made[row : row + part.shape[0], :, columns:] = part
        row += part.shape[0]
    return made
