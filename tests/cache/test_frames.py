"""Frame sizes, and the frames that entries take and free."""

import math

import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Arena, Buffer, HugePages
from tierstore.cache.frames import MIN_FRAME_BYTES, FrameAllocator, choose_frame_bytes, frames_of

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


@settings(max_examples=share(200))
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


FRAME = 4096


def frames(sections: tuple[Buffer, ...]) -> list[int]:
    return [
        frame
        for section in sections
        for offset, nbytes in section.spans
        for frame in range(offset // FRAME, (offset + nbytes) // FRAME)
    ]


def test_those_freed_longest_ago_come_first() -> None:
    done: set[int] = set()
    allocator = FrameAllocator(Arena(6 * FRAME, HugePages.OFF), FRAME, done.__contains__)
    first, second, third = (allocator.allocate([2 * FRAME])[0] for _ in range(3))
    assert list(map(frames, (first, second, third))) == [[0, 1], [2, 3], [4, 5]]
    allocator.free(third, [7])
    allocator.free(first, [8, 9])
    # Two of the third's, and one of the first's, whose other frame stays guarded.
    found, guards = allocator.allocate([FRAME, 2 * FRAME])
    assert (frames(found), guards) == ([0, 4, 5], [7, 8, 9])
    found, guards = allocator.allocate([FRAME])
    assert (frames(found), guards) == ([1], [8, 9])
    # What has finished guards nothing, and what nothing guards is taken lowest first.
    allocator.free(second, [10])
    done.add(10)
    allocator.free(found, [])
    found, guards = allocator.allocate([3 * FRAME])
    assert (frames(found), guards) == ([1, 2, 3], [])


@given(st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), max_size=40))
def test_whoever_takes_a_frame_waits_for_its_last_owner(turns: list[tuple[int, bool, bool]]) -> None:
    done: set[int] = set()
    allocator = FrameAllocator(Arena(9 * FRAME, HugePages.OFF), FRAME, done.__contains__)
    held: list[tuple[Buffer, ...]] = []
    guarded: dict[int, int] = {}
    for ticket, (count, guard, finish) in enumerate(turns, start=1):
        while sum(len(frames(sections)) for sections in held) + count > 9:
            sections = held.pop(0)
            allocator.free(sections, [ticket] if guard else [])
            guarded |= dict.fromkeys(frames(sections), ticket if guard else 0)
        if finish and guarded:
            done.add(min(guarded.values()))
        sections, guards = allocator.allocate([count * FRAME])
        taken = frames(sections)
        assert len(set(taken)) == count
        assert not {frame for other in held for frame in frames(other)} & set(taken)
        assert {guarded.get(frame, 0) for frame in taken} - done - {0} <= set(guards)
        held.append(sections)
