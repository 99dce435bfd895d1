"""Requests from lists of events, and naive caches to hold the lab to."""

from __future__ import annotations

import numpy as np

from tierstore.lab.requests import Requests


def requests_of(events, **columns):
    """Requests of a list of lists of entries; ``writes`` likewise."""
    offsets = np.cumsum([0, *map(len, events)])
    entries = [entry for event in events for entry in event]
    if "writes" in columns:
        columns["writes"] = [write for event in columns["writes"] for write in event]
    return Requests.of_columns(offsets, entries, **columns)


class NaiveLru:
    """Event-atomic LRU, one frame an entry: what an event asks for leaves only after the event."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.order = []  # least recent first
        self.dirty = set()

    def event(self, entries, writes):
        """Misses and write-backs."""
        missing = [entry for entry in entries if entry not in self.order]
        written = 0
        while len(self.order) + len(missing) > self.capacity:
            victim = next(entry for entry in self.order if entry not in entries)
            self.order.remove(victim)
            written += victim in self.dirty
            self.dirty.discard(victim)
        for entry, write in zip(entries, writes, strict=True):
            if entry in self.order:
                self.order.remove(entry)
            self.order.append(entry)
            if write:
                self.dirty.add(entry)
        return len(missing), written
