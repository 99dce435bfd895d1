"""Pins: records that never leave a simulated cache once they have come, and so take no part in its choices.

A record is named by its layer and its place among the records of that layer, counted from 0 in the order of the
trace: ``3:17`` is expert 17 of layer 3. All of its groups are pinned. A live cache has no such setting: pins
answer what a part of the capacity, set aside for records that are known, would be worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tierstore.errors import ConfigError
from tierstore.lab.requests import Requests


def parse_pins(texts: Iterable[str], *, name: str = "pins") -> list[tuple[int, int]]:
    """``3:17,3:18`` as (layer, place) pairs, in order, each once. Raises ConfigError naming ``name``."""
    found: dict[tuple[int, int], None] = {}
    for text in texts:
        for item in text.split(","):
            layer, colon, place = item.strip().partition(":")
            if not (colon and layer.isdecimal() and place.isdecimal()):
                raise ConfigError(f"{name}: expected LAYER:EXPERT,..., got {item!r}")
            found[int(layer), int(place)] = None
    return list(found)


def pin(requests: Requests, records: Sequence[tuple[int, int]], *, name: str = "pins") -> Requests:
    """``requests`` with ``records``, (layer, place) pairs, pinned beside what is pinned already.

    Raises ConfigError, naming ``name``, for a record that the trace does not ask for.
    """
    table = requests.table
    pinned = table.pinned.copy() if len(table.pinned) else np.zeros(len(table), np.uint8)
    for layer, place in records:
        entries = (table.layers == layer) & (table.record_indices == place)
        if not entries.any():
            raise ConfigError(f"{name}: {requests.name} asks for no record {layer}:{place}")
        pinned[entries] = 1
    return replace(requests, table=replace(table, pinned=pinned))
