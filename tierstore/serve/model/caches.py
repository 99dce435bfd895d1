"""Rows of caches: sequences leave a batch, and batches become one.

Shapes: B sequences, H heads, S tokens, C width of a head.

A batch is padded on the left, so that the last column is every sequence's last token. Keys carry the positions that they
were computed with, so columns of padding can be put before them and taken away.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tierstore.serve.model.interface import LayeredCache

#: Layers that hold the keys and values of every token and nothing else.
_PLAIN = ("DynamicLayer", "LayerKeyValues")
#: Where layers of linear attention keep their states, (B, ...) each.
_STATES = ("conv_states", "recurrent_states")


def why_apart(cache: LayeredCache) -> str:
    """Why batches with caches of this kind cannot become one; empty where they can.

    A window keeps the last columns alone, and a state of linear attention has taken the padding of its batch.
    """
    others = sorted({type(layer).__name__ for layer in cache.layers} - set(_PLAIN))
    return f"caches of {', '.join(others)} cannot be padded anew" if others else ""


def select_rows(cache: LayeredCache, rows: Sequence[int]) -> None:
    """Keeps the sequences ``rows``, in this order."""

    def kept(value: Tensor) -> Tensor:
        return value.index_select(0, torch.tensor(rows, device=value.device))

    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            layer.keys, layer.values = kept(layer.keys), kept(layer.values)
        for states in _states(layer):
            states.update({key: kept(value) for key, value in states.items() if value is not None})


def copied_rows(cache: LayeredCache, rows: Sequence[int]) -> LayeredCache:
    """A cache of the sequences ``rows`` alone; ``cache`` keeps them too."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in made.layers:
        for name in _STATES:
            if hasattr(layer, name):
                setattr(layer, name, dict(getattr(layer, name)))
    select_rows(made, rows)
    return made


def drop_columns(cache: LayeredCache, columns: int) -> None:
    """Takes the first ``columns`` of every sequence away: padding. For caches that ``why_apart`` has nothing against."""
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, columns:].contiguous()
        layer.values = layer.values[:, :, columns:].contiguous()


def move(caches: Sequence[LayeredCache], into: LayeredCache, padding: Sequence[int]) -> None:
    """Moves all sequences of ``caches`` to ``into``, which is new, those of each behind so many columns of padding.

    Layer by layer: what has been moved is freed, so that one layer is there twice.
    """
    for number, layer in enumerate(into.layers):
        parts = [cache.layers[number] for cache in caches]
        layer.update(
            _side_by_side([part.keys for part in parts], padding),
            _side_by_side([part.values for part in parts], padding),
        )
        for part in parts:
            part.keys = part.values = None


def cache_nbytes(cache: LayeredCache) -> int:
    """What ``cache`` holds."""
    total = 0
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            total += layer.keys.nbytes + layer.values.nbytes
        total += sum(
            value.nbytes for states in _states(layer) for value in states.values() if value is not None
        )
    return total


def _side_by_side(parts_BHSC: Sequence[Tensor], padding: Sequence[int]) -> Tensor:
    first = parts_BHSC[0]
    rows = sum(part.shape[0] for part in parts_BHSC)
    made = first.new_zeros(rows, first.shape[1], first.shape[2] + padding[0], first.shape[3])
    row = 0
    for part, columns in zip(parts_BHSC, padding, strict=True):
        made[row : row + part.shape[0], :, columns:] = part
        row += part.shape[0]
    return made


def _states(layer: Any) -> list[dict[int, Tensor | None]]:
    return [getattr(layer, name) for name in _STATES if hasattr(layer, name)]
