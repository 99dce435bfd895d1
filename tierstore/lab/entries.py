"""The entries that a trace asks for: how large each is, which record's, and whether a copy of it is on disk."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import ConfigError
from tierstore.units import parse_size

SECTION_GROUPS = 3

Capacity: TypeAlias = int | float | str
"""Frames (an int), a fraction of the footprint (a float, at most 1), or text: ``512MiB``, ``0.4``, ``40%``,
``900f`` (frames)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class EntryTable:
    """Entries as columns. An entry is one section group of one record; entries are numbered densely in the order of
    their keys.
    """

    keys: NDArray[np.uint32]  # record * 3 + section group
    layers: NDArray[np.uint32]
    frames: NDArray[np.uint32]
    nbytes: NDArray[np.uint64]
    stored: NDArray[np.bool_]  # whether there is a backing copy at the start
    record_frames: NDArray[np.uint32]  # of all groups of the entry's record, asked for or not
    record_indices: NDArray[np.uint32]  # of the entry's record among the records of its layer, from 0
    pinned: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))  # or empty: none

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def one_size(self) -> bool:
        """Whether all entries take equally many frames."""
        return bool((self.frames == self.frames[:1]).all())

    @cached_property
    def records(self) -> NDArray[np.uint32]:
        """Which record each entry is a section group of."""
        return self.keys // np.uint32(SECTION_GROUPS)

    @cached_property
    def groups(self) -> NDArray[np.uint8]:
        """Which of its record's section groups each entry is."""
        return (self.keys % np.uint32(SECTION_GROUPS)).astype(np.uint8)

    @property
    def layer_count(self) -> int:
        """One more than the highest layer."""
        return int(self.layers.max()) + 1 if len(self.layers) else 0

    @cached_property
    def total_frames(self) -> int:
        """The footprint: frames of all entries."""
        return int(self.frames.sum(dtype=np.uint64))

    @cached_property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum(dtype=np.uint64))

    @cached_property
    def frame_bytes(self) -> int:
        """Bytes of a frame: the least that every entry fits its frames with.

        It is what a capacity in bytes is counted by, nothing else: what is read and written is entries' bytes.
        """
        if not len(self.frames):
            return 1
        return max(1, int(np.ceil((self.nbytes / np.maximum(self.frames, 1)).max())))

    @cached_property
    def layer_frames(self) -> NDArray[np.uint64]:
        """Frames of each layer's entries [layers]."""
        return np.bincount(self.layers, weights=self.frames, minlength=self.layer_count).astype(np.uint64)

    @cached_property
    def present_layers(self) -> list[int]:
        """The layers that ask for anything, ascending."""
        layers: list[int] = np.unique(self.layers).tolist()
        return layers

    @cached_property
    def largest_record_frames(self) -> int:
        """Frames of the largest record with all of its groups: what a live cache must hold at once."""
        return int(self.record_frames.max(initial=0))

    @property
    def pins(self) -> str:
        """What is pinned, in words: empty for nothing."""
        if not self.pinned.any():
            return ""
        entries = self.pinned > 0
        records = len(np.unique(self.records[entries]))
        frames = int(self.frames[entries].sum(dtype=np.uint64))
        return f"{records} record{'' if records == 1 else 's'} of {frames} frame{'' if frames == 1 else 's'} pinned"

    def frames_of(self, capacity: Capacity, *, name: str = "capacity") -> int:
        """``capacity`` in frames, at least 1. ``name`` is what the error calls it. Raises ConfigError."""
        frames = self._frames(capacity, name)
        if frames < 1:
            raise ConfigError(
                f"{name}: {capacity!r} is less than a frame of {self.frame_bytes} bytes "
                f"(the trace asks for {self.total_frames} frames in all)"
            )
        return frames

    def _frames(self, capacity: Capacity, name: str) -> int:
        if isinstance(capacity, float):
            if not 0 < capacity <= 1:
                raise ConfigError(f"{name}: expected a fraction of the footprint in (0, 1], got {capacity:g}")
            return int(capacity * self.total_frames)
        if isinstance(capacity, int):
            return capacity
        text = capacity.strip()
        if text.endswith("f") and text[:-1].isdigit():
            return int(text[:-1])
        if text.endswith("%") or (text.replace(".", "", 1).isdigit() and "." in text):
            return parse_size(text, whole=self.total_frames, name=name)
        return parse_size(text, name=name) // self.frame_bytes
