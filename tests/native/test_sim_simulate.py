"""The simulator on cases small enough to work by hand."""

from __future__ import annotations

import numpy as np

from tierstore import _native
from tierstore._native import Contract, Scope


def columns(events):
    """``offsets`` and ``entries`` of a list of lists."""
    offsets = np.cumsum([0, *(len(event) for event in events)]).astype(np.uint64)
    return offsets, np.array([entry for event in events for entry in event], np.uint32)


def test_the_case_from_the_literature():
    # 3 layers x 4 experts, 2 slots a layer, LRU: see test_cache_residency.py for the count.
    sets = ([0, 1], [0, 2], [0, 1], [0, 3], [0, 1])
    events = [[4 * layer + expert for expert in chosen] for chosen in sets for layer in range(3)]
    result = _native.simulate(
        *columns(events),
        layers=np.tile(np.arange(3, dtype=np.uint32), 5),
        steps=np.repeat(np.arange(5, dtype=np.uint32), 3),
        policy="lru",
        capacity_frames=6,
        scope=Scope.LAYER,
        layer_quotas=[2, 2, 2],
        contract=Contract.ATOMIC,
    )
    assert (result["requests"], result["hits"], result["misses"]) == (30, 12, 18)
    assert result["layer_hits"].tolist() == [4, 4, 4]
    assert result["layer_misses"].tolist() == [6, 6, 6]
    assert result["step_misses"].tolist() == [6, 3, 3, 3, 3]
    assert result["evictions"] == 12
