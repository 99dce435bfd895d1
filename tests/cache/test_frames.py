"""Frame sizes worked by hand, and what any choice must satisfy."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.cache.frames import MIN_FRAME_BYTES, choose_frame_bytes, frames_of

KIB = 1024


@pytest.mark.parametrize(
    ("sections", "frame"),
    [
        ([6 << 20, 6 << 20, 6 << 20], 6 << 20),  # equal sections: one frame each
        ([2 << 20, 2 << 20, 4 << 20], 2 << 20),  # bf16 weights with fp32 moments
        ([2000, 4000], 4096),  # below a page each
        ([8 * KIB, 12 * KIB], 4 * KIB),  # small: a few frames of their divisor
        ([5000], 8192),
        ([], MIN_FRAME_BYTES),
    ],
)
def test_by_hand(sections: list[int], frame: int) -> None:
    assert choose_frame_bytes(sections) == frame


def test_frames_of() -> None:
    assert frames_of([4096, 4097, 1], 4096) == 1 + 2 + 1


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40 << 20), min_size=1, max_size=6))
def test_choices(sections: list[int]) -> None:
    frame = choose_frame_bytes(sections)
    padded = [-(-nbytes // 4096) * 4096 for nbytes in sections]
    held = frame * frames_of(padded, frame)
    assert frame % 4096 == 0
    assert held >= sum(padded)
    if frame == math.gcd(*padded):
        assert held == sum(padded)
    # A frame is never larger than needs be: each section wastes less than one frame, and few are small.
    assert held - sum(padded) < frame * len(sections)
    assert frame <= max(min(padded), MIN_FRAME_BYTES)
    # Bookkeeping stays bounded: frames are not tiny where sections are large.
    assert frame >= min(MIN_FRAME_BYTES, min(padded), max(padded) // 64)
