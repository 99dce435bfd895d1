"""Frames that come and go: which are taken, and what their next owner waits for."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Arena, Buffer, HugePages
from tierstore.cache.frame_allocator import FrameAllocator

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


@settings(max_examples=100, deadline=None)
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
