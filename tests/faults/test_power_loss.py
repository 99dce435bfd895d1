"""Ten thousand power cuts (``effort``): whatever the disk holds, the store reopens at an acknowledged commit, whole.

``tests/store/test_crash_replay.py`` replays the engine's own log with LMDB's transactions taken as atomic. Here the
log is that of a file system below the whole store, with the index's writes, names and sizes in it. ``power_cuts.py``
beside this file tries as many states as one likes.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from effort import share
from faultfs import unavailable
from power_cuts import cut_once, cut_twice, damage, opening, violation
from power_loss import CrashState, Event, Kind, crash_states, empty, without
from power_workloads import WORKLOADS, Begun, record
from slowness import mostly_slow

from tierstore.store import OpenAt, ParameterStore

needs_fuse = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "FUSE can be mounted")

STATES = 1000
NAMED = {workload.name: workload for workload in WORKLOADS}
TWICE = ["plain", "created", "rolled_back", "discarding", "spread"]


@pytest.mark.slow
@needs_fuse
@pytest.mark.parametrize("name", NAMED)
def test_power_cuts(fast_path: Path, name: str) -> None:
    states = share(STATES)
    tried = cut_once(fast_path, NAMED[name], states)
    assert tried.wrong == ""
    assert tried.states >= states
    assert set(tried.kinds) == set(Kind)
    assert tried.went_on >= states // 25


def test_ten_thousand_states_are_tried() -> None:
    assert STATES * len(WORKLOADS) >= 10_000


@needs_fuse
@pytest.mark.parametrize("name", mostly_slow(TWICE, "created"))
def test_power_cuts_after_a_power_cut(fast_path: Path, name: str) -> None:
    """What is found is opened, or collected first, or made anew where it was being made: and the power fails again."""
    tried = cut_twice(fast_path, NAMED[name], share(160), 8)
    assert tried.wrong == ""
    assert tried.states >= share(140)


@pytest.mark.slow
@needs_fuse
def test_a_prepared_commit_can_be_undone_after_a_power_cut(fast_path: Path) -> None:
    """Until its acknowledgement has begun; also where the cut met the prepare, and it has landed by chance."""
    log, commits = record(fast_path, NAMED["prepared"])
    root, tried = fast_path / "crashed", 0
    root.mkdir()
    for state in crash_states(log, share(1500), seed=1, first=commits[1].began):
        if not any(c.began < state.cut <= c.acknowledging for c in commits):
            continue
        empty(root)
        state.write(root)
        with ParameterStore.open(root / "s", opening(root)) as store:
            found = store.last_commit.generation
        (last,) = (c for c in commits if c.generation == found)
        if 0 < last.acknowledging < state.cut or found == 1:
            continue
        tried += 1
        assert undone(root, state, commits, found - 1) == "", state.cut
    assert tried >= share(30)


def undone(root: Path, state: CrashState, commits: list[Begun], generation: int) -> str:
    """What is wrong with going back to ``generation``."""
    (wanted,) = (c.commit for c in commits if c.generation == generation)
    empty(root)
    state.write(root)
    with ParameterStore.open(root / "s", opening(root), at=OpenAt.PREVIOUS) as store:
        committer = store.core.committer
        if (committer.table, committer.state) != (wanted.records, wanted.state):
            return f"not what commit {generation} was"
        return damage(state, committer.table)


@needs_fuse
@pytest.mark.parametrize(
    ("name", "op", "path"),
    [
        ("plain", "fsync", "expert.weights"),
        ("plain", "fsync", "expert.moments"),
        ("plain", "fsync", "data.mdb"),
        ("created", "fsync", "tierstore.json.new"),
        ("created", "fsyncdir", "/index"),
        ("created", "fsyncdir", "/extents"),
        ("created", "fsyncdir", "s"),  # before anything is made, before the identity's rename, and after it
        pytest.param("growing", "fsync", "other.weights", marks=pytest.mark.slow),
        ("spread", "fsync", "b/extents/expert.weights"),
        ("spread", "fsync", "b/tierstore.json.new"),
        ("spread", "fsyncdir", "b/extents"),
        ("spread", "fsyncdir", "b"),
        ("discarding", "fsync", "expert.moments"),
        ("rolled_back", "fsync", "data.mdb"),
    ],
)
def test_without_this_sync_the_replay_fails(fast_path: Path, name: str, op: str, path: str) -> None:
    """Each sync that a commit makes is needed: a log without it has states that lose the commit."""
    workload = NAMED[name]
    log, commits = record(fast_path, workload)
    kept = without(log, op, path)
    assert len(kept) < len(log)
    # Cuts are positions in the log: those of commits move with what is left out.
    gone = np.cumsum([event[2] == op and event[3].endswith(path) for event in log])

    def moved(at: int) -> int:
        return at - int(gone[at - 1]) if at else 0

    moved_commits = [
        replace(c, began=moved(c.began), ended=moved(c.ended), acknowledging=moved(c.acknowledging))
        for c in commits
    ]
    first = moved_commits[0].ended
    tried = violation(fast_path, kept, moved_commits, 2 * STATES, drives=workload.drives, first=first)
    assert tried.wrong != ""


# The model --------------------------------------------------------------------------------------------------


def begin(number: int, op: str, path: str, offset: int = 0, content: bytes = b"") -> Event:
    return ("begin", number, op, path, offset, content)


def end(number: int, op: str, path: str) -> Event:
    return ("end", number, op, path, 0, b"")


def contents(log: list[Event], count: int = 200) -> set[bytes]:
    """What file ``f`` may hold after the whole of ``log``; it is not there: ``b"-"``."""
    return {
        bytes(state.files["f"].data) if "f" in state.files else b"-"
        for state in crash_states(log, count, first=len(log) - 1)
    }


NAMED_FILE: list[Event] = [
    begin(1, "create", "f"),
    end(1, "create", "f"),
    begin(2, "fsyncdir", "."),
    end(2, "fsyncdir", "."),
]


def test_two_writes_and_a_sync_between_them_by_hand() -> None:
    """A, synced, is there; B after it may be there or not; a name that was not synced may not be."""
    log = [begin(3, "write", "f", 0, b"A"), end(3, "write", "f")]
    log += [begin(4, "fsync", "f"), end(4, "fsync", "f"), begin(5, "write", "f", 1, b"B")]
    assert contents(NAMED_FILE + log) == {b"A", b"AB"}
    assert contents(NAMED_FILE[:2] + log) == {b"-", b"A", b"AB"}


def test_writes_that_no_sync_covers_come_in_any_combination() -> None:
    log = []
    for number, letter in enumerate(b"ABC"):
        log += [begin(3 + number, "write", "f", number, bytes([letter])), end(3 + number, "write", "f")]
    # A sync that has not ended covers nothing; a write that ended after it began is not covered.
    log += [begin(6, "fsync", "f")]
    expected = {
        bytes(a + b + c).rstrip(b"\0") for a in (b"A", b"\0") for b in (b"B", b"\0") for c in (b"C", b"\0")
    }
    assert contents(NAMED_FILE + log) == expected


def test_sectors_of_one_write_come_in_any_combination() -> None:
    log = [begin(3, "write", "f", 0, b"A" * 512 + b"B" * 100), end(3, "write", "f")]
    a, b, hole = b"A" * 512, b"B" * 100, bytes(512)
    assert contents(NAMED_FILE + log) == {b"", a, a + b, hole + b}


def test_changes_of_one_place_under_way_at_once_take_effect_in_any_order() -> None:
    both = [begin(3, "write", "f", 0, b"A"), begin(4, "fallocate", "f", 0, b"1 3"), end(3, "write", "f")]
    both += [end(4, "fallocate", "f"), begin(5, "fsync", "f"), end(5, "fsync", "f")]
    assert contents(NAMED_FILE + both) == {b"A", b"\0"}
    one_after_another = [both[0], both[2], both[1], *both[3:]]
    assert contents(NAMED_FILE + one_after_another) == {b"\0"}


def test_a_rename_and_what_it_names_are_lost_apart() -> None:
    log = [begin(3, "write", "f", 0, b"A"), end(3, "write", "f")]
    log += [begin(4, "rename", "f", 0, b"g"), end(4, "rename", "f")]
    found = {
        tuple((name, bytes(content.data)) for name, content in state.files.items())
        for state in crash_states(NAMED_FILE + log, 100, first=len(NAMED_FILE + log) - 1)
    }
    assert found == {(("f", b""),), (("f", b"A"),), (("g", b""),), (("g", b"A"),)}


def test_a_disk_goes_on_from_what_a_cut_left() -> None:
    log = [*NAMED_FILE, begin(3, "write", "f", 0, b"A")]
    (state,) = (s for s in crash_states(log, 2, first=len(log) - 1) if s.kind is Kind.PREFIX)
    more: list[Event] = [begin(1, "write", "f", 1, b"B"), end(1, "write", "f"), begin(2, "unlink", "f")]
    found = {
        bytes(s.files["f"].data) if "f" in s.files else b"-"
        for s in crash_states(more, 50, first=len(more) - 1, start=state)
    }
    assert found == {b"A", b"AB", b"-"}


def test_no_state_is_drawn_twice() -> None:
    log = [begin(3, "write", "f", 0, b"A"), end(3, "write", "f")]
    assert len(list(crash_states(NAMED_FILE + log, 1000, first=len(NAMED_FILE)))) == 2
