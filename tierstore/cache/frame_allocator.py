"""Memory of the host arena for entries that come and go, frame by frame."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence

from tierstore._native import Arena, Buffer
from tierstore.cache.frames import frames_of


class FrameAllocator:
    """Cuts ``arena`` in frames of ``frame_bytes``. A freed frame is *guarded* by what its last owner has queued on it:
    tickets, of which ``done`` says whether they have finished.

    Frames that nothing guards are taken first; then those freed longest ago, whose transfers are nearest to their end.
    """

    def __init__(self, arena: Arena, frame_bytes: int, done: Callable[[int], bool]) -> None:
        self._arena = arena
        self._frame_bytes = frame_bytes
        self._done = done
        self.total = arena.nbytes // frame_bytes
        self._free = list(range(self.total))
        #: Frames freed together, and their guards, in the order in which they were freed.
        self._guarded: deque[tuple[list[int], tuple[int, ...]]] = deque()

    def count(self, section_nbytes: Sequence[int]) -> int:
        """Frames that hold sections of these sizes (bytes)."""
        return frames_of(section_nbytes, self._frame_bytes)

    def allocate(self, section_nbytes: Sequence[int]) -> tuple[tuple[Buffer, ...], list[int]]:
        """One Buffer a section, and the tickets that must finish before they are written."""
        counts = [self.count([nbytes]) for nbytes in section_nbytes]
        frames, guards = self._take(sum(counts))
        sections, at = [], 0
        for nbytes, count in zip(section_nbytes, counts, strict=True):
            sections.append(Buffer(self._arena, self._spans(frames[at : at + count]), nbytes))
            at += count
        return tuple(sections), guards

    def _take(self, count: int) -> tuple[list[int], list[int]]:
        """``count`` frames, ascending, and their guards."""
        while self._guarded and all(map(self._done, self._guarded[0][1])):
            for frame in self._guarded.popleft()[0]:
                heapq.heappush(self._free, frame)
        # Lowest first: neighbours tend to come together, and their spans merge into one.
        frames = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        guards: set[int] = set()
        while missing := count - len(frames):
            oldest, after = self._guarded.popleft()
            frames += oldest[:missing]
            guards.update(after)
            if len(oldest) > missing:
                self._guarded.appendleft((oldest[missing:], after))
        return sorted(frames), sorted(guards)

    def free(self, sections: Sequence[Buffer], after: Sequence[int]) -> None:
        """Takes the memory back; whoever writes it next follows the tickets ``after``."""
        size = self._frame_bytes
        spans = [span for section in sections for span in section.spans]
        frames = [
            frame for offset, nbytes in spans for frame in range(offset // size, (offset + nbytes) // size)
        ]
        if after:
            self._guarded.append((frames, tuple(after)))
            return
        for frame in frames:
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
