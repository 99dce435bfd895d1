"""Reading ahead in a pass over a store: the order, the reads in flight, and the memory they share, by its buffers."""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest_store import ScratchMemory, small_store
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import Buffer
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.disk import extents
from tierstore.store.disk.extents import Scratch, read_ahead
from tierstore.store.format import Group, GroupLayout, Section

PAGE = 4096


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> ScratchMemory:
    counted = ScratchMemory()
    monkeypatch.setattr(extents, "scratch_buffers", counted)
    return counted


def layout(pages: int) -> GroupLayout:
    return GroupLayout(Group.WEIGHTS, (Section("weight", "<f4", pages * PAGE // 4),), 0)


def read(pages: list[int], log: list[str]) -> Iterator[tuple[int, list[Buffer]]]:
    """Items of these sizes; ``log`` says when each is queued."""

    def begin(item: tuple[int, int], scratch: Scratch) -> tuple[int, list[Buffer]]:
        number, size = item
        log.append(f"queue {number}")
        return number, scratch(layout(size))

    return read_ahead(list(enumerate(pages)), lambda item: item[1] * PAGE, begin)


def test_worked_by_hand(memory: ScratchMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pages in flight: two items of two pages; three pages wait for both. Memory of more than four pages, the longest
    unused of it, goes before more is taken.
    """
    monkeypatch.setattr(extents, "_IN_FLIGHT_BYTES", 4 * PAGE)
    log: list[str] = []
    for number, buffers in read([2, 2, 2, 3, 5, 1], log):
        del buffers
        log.append(f"read {number}: {memory.held // PAGE} pages")
    assert log == [
        *("queue 0", "queue 1", "read 0: 4 pages"),
        *("queue 2", "read 1: 4 pages", "read 2: 4 pages"),  # in the memory of item 0
        *("queue 3", "read 3: 7 pages"),
        *("queue 4", "read 4: 8 pages"),  # larger than the limit: alone
        *("queue 5", "read 5: 1 pages"),
    ]
    assert memory.made == 5


def test_sizes_in_turns_keep_their_memory(memory: ScratchMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "_IN_FLIGHT_BYTES", 5 * PAGE)
    log: list[str] = []
    assert len(list(read([2, 1] * 20, log))) == 40
    assert (memory.made, memory.most) == (4, 6 * PAGE)  # two of each


@given(pages=st.lists(st.integers(1, 6), max_size=40), limit=st.integers(1, 12), most=st.integers(1, 5))
def test_the_order_and_the_limits(pages: list[int], limit: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        memory = ScratchMemory()
        patched.setattr(extents, "scratch_buffers", memory)
        patched.setattr(extents, "_IN_FLIGHT_BYTES", limit * PAGE)
        patched.setattr(extents, "_IN_FLIGHT", most)
        log: list[str] = []
        seen = 0
        for number, buffers in read(pages, log):
            assert number == seen
            seen += 1
            queued = len(log)
            assert queued - number <= most
            assert sum(pages[number:queued]) <= max(limit, pages[number])
            buffers[0].array()[:] = number  # nobody else's: later ones are written when they are read
            del buffers
            assert memory.held <= (limit + max(pages)) * PAGE
        assert seen == len(pages)


@pytest.mark.parametrize("behind", [False, True])
def test_passes_over_a_store_hold_no_more_than_the_limit(
    tmp_path: Path, memory: ScratchMemory, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    """Of 40 records of 12 pages at most 28 pages are held, also where steps are replayed; their bytes are the progress."""
    monkeypatch.setattr(extents, "_IN_FLIGHT_BYTES", 28 * PAGE)
    with small_store(tmp_path / "s", count=40, numel=4 * PAGE // 4) as store:
        if behind:
            store.update({"e7": np.ones(4 * PAGE // 4, np.float32)}, lr=0.1)
            store.commit()
    with ParameterStore.open(tmp_path / "s", StoreConfig(host_budget=1 << 18)) as store:
        crc = 0
        for key in store.keys:  # the oracle: one record after another
            for section in store.core.sections(key):
                crc = _native.crc32c(section.array(), crc)
        del section
        gc.collect()
        memory.most = memory.made = 0
        seen: list[tuple[int, int]] = []
        assert store.verify(lambda *at: seen.append(at)).failures == []
        assert (memory.most // PAGE, memory.made) == (28, 5)  # 4, 8, 4, 8 and 4 pages
        assert seen[::2] == [(number * 12 * PAGE, 40 * 12 * PAGE) for number in range(41)]
        seen.clear()
        assert store.records_crc32c(lambda *at: seen.append(at)) == crc
        assert memory.most // PAGE == 28
        assert seen == [(number * 12 * PAGE, 40 * 12 * PAGE) for number in range(41)]
