"""Requests and traces from lists of events, and naive caches to hold the lab to."""

import io
import json
import sys
from dataclasses import replace
from itertools import product

import numpy as np

from tierstore.lab.requests import Requests
from tierstore.lab.results import Outcome
from tierstore.lab.simulate import PolicySpec, ReplaySetting, replay_each, replay_windows
from tierstore.trace.files import TraceWriter
from tierstore.trace.format import TraceHeader, TraceKind, TraceRecord

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

RECORD = TraceRecord(0, (1, 2, 1), (4096, 8000, 4096), 3)


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def json_lines(*rows):
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


def requests_of(events, **columns):
    """Requests of a list of lists of entries; ``writes`` likewise."""
    offsets = np.cumsum([0, *map(len, events)])
    entries = [entry for event in events for entry in event]
    if "writes" in columns:
        columns["writes"] = [write for event in columns["writes"] for write in event]
    return Requests.of_columns(offsets, entries, **columns)


def simulate(
    requests, policies, capacities, *, windows=0, warmup_steps=0, threads=0, progress=None, **setting
):
    """A replay of every policy (its name or a PolicySpec) at every capacity: the outcomes, by policy."""

    def reduce(replayed):
        return replace(replayed.outcome, windows=replay_windows(replayed, windows) if windows else ())

    specs = [PolicySpec.parse(policy) if isinstance(policy, str) else policy for policy in policies]
    frames = [requests.table.frames_of(capacity) for capacity in capacities]
    settings = [ReplaySetting(spec, size, **setting) for spec, size in product(specs, frames)]
    return replay_each(
        requests, settings, reduce, warmup_steps=warmup_steps, threads=threads, progress=progress
    )


def write_events(path, events, records=4, record=RECORD):
    """Events (kind, step, phase, layer, records, flags)."""
    header = TraceHeader(capacity_frames=8, records=(record,) * records)
    with TraceWriter(path, header) as writer:
        for kind, step, phase, layer, asked, flags in events:
            writer.event(
                kind,
                step=step,
                phase=phase,
                layer=layer,
                records=np.array(asked, np.uint32),
                flags=np.array(flags, np.uint16),
            )
    return path


def access(step, asked, flags, phase=1, layer=0):
    return (TraceKind.ACCESS, step, phase, layer, asked, flags)


def outcome(frames, misses, **more):
    return Outcome(
        policy="lru",
        capacity_frames=frames,
        capacity_fraction=frames / 100,
        scope="global",
        contract="event-atomic",
        steps=1,
        requests=100,
        hits=100 - misses,
        misses=misses,
        **more,
    )


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
