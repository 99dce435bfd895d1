"""The host arena in equal frames, so that no allocation fails because of fragmentation: their size and allocation."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from tierstore._native import Arena, Buffer

#: A frame is a multiple of this (direct I/O), and at least MIN_FRAME_BYTES (vectored I/O takes at most 1,024 pieces,
#: and each frame costs bookkeeping time).
_ALIGNMENT = 4096
MIN_FRAME_BYTES = 64 * 1024
_FEW_FRAMES = 64
#: The share of a record's frames that may be empty because of its scales.
_MOST_WASTE = 0.02


def frames_of(section_nbytes: Iterable[int], frame_bytes: int) -> int:
    """The number of frames for these sections; each section begins a new frame."""
    return sum(-(-nbytes // frame_bytes) for nbytes in section_nbytes)


def choose_frame_bytes(section_nbytes: Iterable[int]) -> int:
    """The frame size for sections of these sizes (bytes).

    The greatest common divisor wastes nothing. If it is too small (below MIN_FRAME_BYTES with sections of many frames),
    the size between MIN_FRAME_BYTES and the smallest section that wastes the least over one of each section is taken; of
    equals, the larger.
    """
    padded = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in section_nbytes]
    if not padded:
        return MIN_FRAME_BYTES
    divisor = math.gcd(*padded)
    if divisor >= min(MIN_FRAME_BYTES, min(padded)) or max(padded) <= _FEW_FRAMES * divisor:
        return divisor
    upper = max(min(padded), MIN_FRAME_BYTES)
    step = max(_ALIGNMENT, (upper - MIN_FRAME_BYTES) // 256 // _ALIGNMENT * _ALIGNMENT)
    candidates = range(upper, MIN_FRAME_BYTES - 1, -step)
    return min(candidates, key=lambda size: (size * frames_of(padded, size), -size))


def choose_frame_bytes_beside(section_nbytes: Iterable[int], scale_nbytes: Iterable[int]) -> int:
    """The frame size for sections of these sizes (bytes) and for scales, which are far smaller than a frame of the sections.

    The largest divisor of the frame size of the sections alone with which sections and scales together waste at most 2%.
    """
    sections, scales = list(section_nbytes), list(scale_nbytes)
    frame = choose_frame_bytes(sections)
    if not scales:
        return frame
    every = [-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in (*sections, *scales)]
    pages = frame // _ALIGNMENT
    for size in (frame // parts for parts in range(1, pages + 1) if pages % parts == 0):
        if size * frames_of(every, size) <= (1 + _MOST_WASTE) * sum(every):
            return size
    return _ALIGNMENT


class FrameAllocator:
    """Cuts ``arena`` into frames of ``frame_bytes``. A freed frame is *guarded* by the tickets that its last owner queued on
    it; ``done`` says whether a ticket has finished.

    Unguarded frames are taken first, then those freed longest ago, whose transfers are nearest to their end.
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
        """One Buffer per section, and the tickets that must finish before they are written."""
        counts = [self.count([nbytes]) for nbytes in section_nbytes]
        frames, guards = self._take(sum(counts))
        sections, at = [], 0
        for nbytes, count in zip(section_nbytes, counts, strict=True):
            sections.append(Buffer(self._arena, self._spans(frames[at : at + count]), nbytes))
            at += count
        return tuple(sections), guards

    def _take(self, count: int) -> tuple[list[int], list[int]]:
        """Take ``count`` frames; returns them ascending, and their guards."""
        while self._guarded and all(map(self._done, self._guarded[0][1])):
            for frame in self._guarded.popleft()[0]:
                heapq.heappush(self._free, frame)
        # Lowest first: neighbours tend to be allocated together, and their spans merge into one.
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
        """Free the memory; its next writer must follow the tickets ``after``."""
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
