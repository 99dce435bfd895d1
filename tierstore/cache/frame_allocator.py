"""Memory of the host arena for entries that come and go, frame by frame."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tierstore._native import Arena, Buffer
from tierstore.cache.frames import frames_of


class FrameAllocator:
    """Cuts ``arena`` in frames of ``frame_bytes``. A freed frame is guarded by what its last owner has queued on it."""

    def __init__(self, arena: Arena, frame_bytes: int) -> None:
        self._arena = arena
        self._frame_bytes = frame_bytes
        self._free = list(range(arena.nbytes // frame_bytes))
        self._guards: dict[int, tuple[int, ...]] = {}

    def count(self, section_nbytes: Sequence[int]) -> int:
        """Frames that hold sections of these sizes (bytes)."""
        return frames_of(section_nbytes, self._frame_bytes)

    def allocate(self, section_nbytes: Sequence[int]) -> tuple[tuple[Buffer, ...], list[int]]:
        """One Buffer a section, and the tickets that must finish before they are written."""
        guards: set[int] = set()
        sections = []
        for nbytes in section_nbytes:
            # Lowest first: neighbours tend to come together, and their spans merge into one.
            frames = [heapq.heappop(self._free) for _ in range(self.count([nbytes]))]
            for frame in frames:
                guards.update(self._guards.pop(frame, ()))
            sections.append(Buffer(self._arena, self._spans(frames), nbytes))
        return tuple(sections), sorted(guards)

    def free(self, sections: Sequence[Buffer], after: Sequence[int]) -> None:
        """Takes the memory back; whoever writes it next follows the tickets ``after``."""
        guards, size = tuple(after), self._frame_bytes
        for section in sections:
            for offset, nbytes in section.spans:
                for frame in range(offset // size, (offset + nbytes) // size):
                    if guards:
                        self._guards[frame] = guards
                    heapq.heappush(self._free, frame)

    def _spans(self, frames: Sequence[int]) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        size = self._frame_bytes
        for frame in frames:
            if spans and sum(spans[-1]) == frame * size:
                spans[-1] = (spans[-1][0], spans[-1][1] + size)
            else:
                spans.append((frame * size, size))
        return spans
