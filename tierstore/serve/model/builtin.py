"""Forward passes of the built-in transformer with a cache of keys and values."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from tierstore.model.kv_cache import KeyValueCache
from tierstore.model.transformer import Transformer
from tierstore.serve.model.interface import LayeredCache
from tierstore.serve.model.wrapped import checked_context


class BuiltInModel:
    """``model`` as a ``ServedModel``. ``context`` 0 is the length that it was trained with.

    Raises ConfigError for a context beyond it.
    """

    def __init__(self, model: Transformer, *, context: int = 0) -> None:
        self._model = model
        self._context = checked_context(context, model.config.seq_len)

    @property
    def context(self) -> int:
        return self._context

    @property
    def vocabulary(self) -> int:
        return self._model.config.vocab_size

    @property
    def pad_token(self) -> int:
        return 0

    def new_cache(self) -> LayeredCache:
        return KeyValueCache.of(len(self._model.blocks))

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        return self._model.follow(tokens_BT, cast(KeyValueCache, cache), mask_BS, positions_BT)
