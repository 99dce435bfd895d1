"""How the host arena is cut: equal frames, so that no entry is ever refused for fragmentation."""

from __future__ import annotations

import math
from collections.abc import Iterable

#: A frame is a multiple of this (direct I/O), and not smaller than MIN_FRAME_BYTES (vectored I/O takes at
#: most
#: 1,024 pieces, and bookkeeping costs time per frame).
_ALIGNMENT = 4096
MIN_FRAME_BYTES = 64 * 1024
_FEW_FRAMES = 64
#: The share of a record's frames that may be empty because of its scales.
_MOST_WASTE = 0.02


def frames_of(section_nbytes: Iterable[int], frame_bytes: int) -> int:
    """Frames that hold these sections: each section begins a frame of its own."""
    return sum(-(-nbytes // frame_bytes) for nbytes in section_nbytes)


def choose_frame_bytes(section_nbytes: Iterable[int]) -> int:
    """The frame size for sections of these sizes (bytes).

    The greatest common divisor wastes nothing. Where it is too small (below MIN_FRAME_BYTES with sections of
    many frames), the size between MIN_FRAME_BYTES and the smallest section that wastes the least over one of
    each section is taken, the larger of equals.
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
    """The frame size for sections of these sizes (bytes) and for scales, which are far smaller than a frame of theirs.

    It divides the size that the sections alone would get: the largest such size with which sections and scales together
    waste at most 2%.
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
