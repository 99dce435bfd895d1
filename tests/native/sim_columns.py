"""Columns of requests as ``_native.simulate`` takes them, from lists."""

import numpy as np


def columns(events):
    """``offsets`` and ``entries`` of events that are lists of entries."""
    offsets = np.cumsum([0, *(len(event) for event in events)]).astype(np.uint64)
    return offsets, np.array([entry for event in events for entry in event], np.uint32)


def singles(keys):
    """``offsets`` and ``entries`` of one request an event, keys numbered from 0."""
    _, entries = np.unique(np.asarray(keys), return_inverse=True)
    return np.arange(len(entries) + 1, dtype=np.uint64), entries.astype(np.uint32)


def zipf(keys, length, skew, seed):
    """Independent draws; the popular keys are anywhere among the numbers."""
    random = np.random.default_rng(seed)
    share = np.cumsum(np.arange(1, keys + 1) ** -float(skew))
    drawn = np.searchsorted(share, random.random(length) * share[-1])
    return random.permutation(keys).astype(np.uint32)[drawn]
