"""A model as the batches see it.

Shapes: B sequences, T tokens of this pass, S tokens with those that the cache holds, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class LayeredCache(Protocol):
    """What a model keeps of the tokens before: transformers' ``DynamicCache``, or the built-in model's.

    A layer of attention has ``keys`` and ``values`` (B, heads, S, width) once it has seen tokens.
    """

    layers: Any


class ServedModel(Protocol):
    """A model in evaluation, whose experts are leased. One caller, one pass at a time."""

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        ...

    @property
    def vocabulary(self) -> int:
        """V, the number of tokens that it knows."""
        ...

    @property
    def pad_token(self) -> int:
        """What stands before the shorter sequences of a batch: no token sees it."""
        ...

    def new_cache(self) -> LayeredCache:
        """A cache without tokens, of any number of sequences."""
        ...

    def forward(
        self, tokens_BT: Tensor, cache: LayeredCache, *, mask_BS: Tensor, positions_BT: Tensor
    ) -> Tensor:
        """The logits (B, V), fp32, of what follows; ``cache`` then holds the tokens too.

        ``mask_BS``: 1 for a token, 0 for padding before the first; ``positions_BT``: of each token in its sequence.
        """
        ...
