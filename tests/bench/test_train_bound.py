"""The bound of a training step: worked examples, and the clairvoyant bytes against brute force."""

from pathlib import Path

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.bench.probes import Bytes
from tierstore.bench.train_bound import bound_s, clairvoyant, compulsory
from tierstore.cache.access import Need
from tierstore.errors import DataError
from tierstore.trace.files import TraceWriter, load_trace
from tierstore.trace.format import TraceHeader, TraceKind, TraceRecord

WEIGHTS, STEP = int(Need.WEIGHTS), int(Need.WEIGHTS | Need.DIRTY_WEIGHTS)


def write(
    path: Path, steps: list[list[int]], *, capacity: int, records: int, flags: int, lookahead: int = 0
) -> None:
    """Accesses to one record each, of one frame, 100 bytes; ``lookahead``: with speculation on the next."""
    record = TraceRecord(0, (1, 1, 1), (100, 100, 100), 0b011)
    header = TraceHeader(
        capacity, lookahead_frames=lookahead, policy="lru", records=tuple(record for _ in range(records))
    )
    with TraceWriter(path, header) as trace:
        for step in steps:
            for number in step:
                trace.event(
                    TraceKind.ACCESS,
                    records=np.array([number], np.uint32),
                    flags=np.array([flags], np.uint16),
                )
                if lookahead:
                    following = np.array([(number + 1) % records], np.uint32)
                    trace.event(TraceKind.PREFETCH, records=following, flags=np.array([flags], np.uint16))
            trace.event(TraceKind.END_STEP)


def test_the_bound_is_the_slower_of_computing_and_moving() -> None:
    # 3 GB at 1.5 GB/s take 2 s: more than a step of 1.8 s in RAM, less than one of 2.5 s.
    moved = Bytes(2_000_000_000, 1_000_000_000)
    assert bound_s(1.8, moved, 1.5e9) == 2.0
    assert bound_s(2.5, moved, 1.5e9) == 2.5
    assert bound_s(0.5, Bytes(0, 0), float("inf")) == 0.5
    with pytest.raises(ValueError, match="bandwidth"):
        bound_s(1.0, moved, 0.0)


def test_cyclic_accesses_by_hand(tmp_path: Path) -> None:
    # Records 0 1 2 in turn with room for two, none dirty. LRU always evicts the one that comes next: 3 reads
    # a step. A clairvoyant keeps one of them through. From the second step on it reads 0 1 2 | 0 1 2 | 0 1 2:
    # hits every other access, as the resident pair shifts by one each turn: 4 or 5 of 9 are misses.
    path = tmp_path / "trace"
    write(path, [[0, 1, 2]] * 4, capacity=2, records=3, flags=WEIGHTS)
    found = compulsory(path, first_step=1, steps=3)
    assert found.by_policy["lru"] == Bytes(900, 0)
    assert found.least.total <= 900
    assert found.clairvoyant in (Bytes(400, 0), Bytes(500, 0))


def test_what_was_speculated_on_does_not_count(tmp_path: Path) -> None:
    plain, ahead = tmp_path / "plain", tmp_path / "ahead"
    write(plain, [[0, 2]] * 3, capacity=2, records=4, flags=STEP)
    write(ahead, [[0, 2]] * 3, capacity=2, records=4, flags=STEP, lookahead=1)
    for path in (plain, ahead):
        assert compulsory(path, first_step=1, steps=2).least == Bytes(0, 0)


def test_dirty_entries_are_written_when_they_go(tmp_path: Path) -> None:
    # One frame, two records in turn, both dirty: every access writes one and reads the other.
    path = tmp_path / "trace"
    write(path, [[0, 1]] * 3, capacity=1, records=2, flags=STEP)
    found = compulsory(path, first_step=1, steps=2)
    assert found.least == Bytes(400, 400)
    assert found.clairvoyant == Bytes(400, 400)
    assert found.least.per(2) == Bytes(200, 200)


def test_a_trace_with_fewer_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    write(path, [[0]], capacity=1, records=1, flags=WEIGHTS)
    with pytest.raises(DataError, match="1 steps, expected at least 2"):
        compulsory(path, first_step=1, steps=1)


def fewest_reads(accesses: list[int], capacity: int) -> int:
    """By trying every victim."""
    states = {frozenset[int](): 0}
    for record in accesses:
        after: dict[frozenset[int], int] = {}
        for held, reads in states.items():
            options: list[frozenset[int]] = [held]
            if record not in held:
                reads += 1
                options = [held | {record}]
                if len(held) == capacity:
                    options = [(held - {victim}) | {record} for victim in held]
            for option in options:
                after[option] = min(after.get(option, reads), reads)
        states = after
    return min(states.values())


@settings(max_examples=share(40))
@given(accesses=st.lists(st.integers(0, 4), min_size=1, max_size=10), capacity=st.integers(1, 3))
def test_clean_entries_of_one_size_need_as_few_reads_as_can_be(
    tmp_path_factory: pytest.TempPathFactory, accesses: list[int], capacity: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace"
    write(path, [accesses], capacity=capacity, records=5, flags=WEIGHTS)
    trace = load_trace(path)
    moved = clairvoyant(trace, 0, len(trace))
    assert moved.written == 0
    # The step is taken to come once more, and what is kept for that costs nothing before: whoever is needed
    # again within the step is needed sooner.
    assert moved.read == fewest_reads(accesses, capacity) * 100


@settings(max_examples=share(30))
@given(
    steps=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=2, max_size=4),
    capacity=st.integers(1, 4),
)
def test_no_policy_moves_fewer_clean_bytes_than_the_clairvoyant(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[int]], capacity: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace"
    # A step that comes twice at the end, as the clairvoyant takes it to.
    write(path, [*steps, steps[-1]], capacity=capacity, records=5, flags=WEIGHTS)
    found = compulsory(path, first_step=0, steps=len(steps))
    assert all(found.clairvoyant.read <= moved.read for moved in found.by_policy.values())
