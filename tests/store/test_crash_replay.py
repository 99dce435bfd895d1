"""Promise 3: whatever instant the power fails at, the store reopens at an acknowledged commit, whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store
from crash_states import Entry, Event, Promise, as_change, read_log
from effort import share
from power_loss import Content, CrashState, Kind, crash_states, empty

from tierstore.errors import StoreError
from tierstore.store import OpenAt, ParameterStore, StoreConfig, StripeConfig
from tierstore.store.committing import Committer, Keep
from tierstore.store.disk.extents import Extent
from tierstore.store.index.database import PREVIOUS, Commit
from tierstore.store.index.live import LiveIndex, LiveRecord
from tierstore.store.index.table import CommittedRecords, Rows

NUMEL = 1500  # two pages a section: writes can tear
RECORDS = 5
CONFIG = StoreConfig(host_budget=1 << 18)


class Run:
    """What a run left behind: its log, and at each generation the index image and the content's checksum."""

    def __init__(self, directory: Path, further: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.further = further  # directories of the store besides its own
        self.images: dict[int, bytes] = {}
        self.prepared: dict[int, bytes] = {}  # images between a prepared commit and its acknowledgement
        self.crcs: dict[int, int] = {}
        self.log: list[Entry] = []
        self.files: dict[str, Content] = {}  # of zeros, as large as at the end
        #: Called before each acknowledgement: what another rank's delay leaves time for.
        self.meanwhile: Callable[[ParameterStore], None] = lambda store: None

    def record(self, commits: int = 16, *, prepare: bool = False) -> Run:
        log = self.directory / "io.log"
        rng = np.random.default_rng(1)
        path = self.directory / "run"
        # So small that most of what is updated is evicted, and some of it twice, between commits.
        stripe = StripeConfig(directories=tuple(self.directory / name for name in self.further))
        store = small_store(
            path, count=RECORDS, numel=NUMEL, budget=60_000, retain=1, io_log=log, stripe=stripe
        )
        with store:
            self._committed(store)
            for number in range(commits):
                for _ in range(int(rng.integers(1, 4))):
                    chosen = rng.choice(RECORDS, int(rng.integers(0, 3)), replace=False)
                    gradients = {
                        f"e{i}": rng.standard_normal(NUMEL).astype(np.float32) for i in sorted(chosen)
                    }
                    store.update(gradients, lr=1e-2)
                snapshot = f"s{number}" if number % 5 == 2 else None
                if prepare:
                    store.core.committer.commit({"n": b"%d" % number}, snapshot=snapshot, keep=Keep.PREVIOUS)
                    self.prepared[store.last_commit.generation] = self._image(store)
                    self.meanwhile(store)
                    store.core.committer.acknowledge()
                else:
                    store.commit({"n": b"%d" % number}, snapshot=snapshot)
                self._committed(store)
        self.log = read_log(log)
        for name in ("run", *self.further):
            for file in (self.directory / name / "extents").iterdir():
                self.files[str(file.relative_to(self.directory))] = Content(size=file.stat().st_size)
        return self

    def _image(self, store: ParameterStore) -> bytes:
        # What is zero at its end is so again when the file is made as long as it was.
        return (store.directory / "index" / "data.mdb").read_bytes().rstrip(b"\0")

    def _committed(self, store: ParameterStore) -> None:
        self.images[store.last_commit.generation] = self._image(store)
        # This catches records up and evicts some: writes that belong to no commit yet are in the log too.
        self.crcs[store.last_commit.generation] = store.records_crc32c()

    def reopen(self, state: CrashState, generation: int, at: OpenAt = OpenAt.LAST) -> str:
        """What is wrong with the store that ``state`` leaves; empty when it is the commit it should be: ``generation``, or
        the one before when that, prepared, is undone.
        """
        image = self.images[generation] if at is OpenAt.LAST else self.prepared[generation]
        crashed = self.directory / "crashed"
        path = crashed / "run"
        crashed.mkdir(exist_ok=True)
        empty(crashed)
        state.write(crashed)
        for name in ("run", *self.further):
            shutil.copy(self.directory / name / "tierstore.json", crashed / name)
        with open(path / "index" / "data.mdb", "wb") as file:
            file.write(image)
            file.truncate(max(file.tell(), 1 << 20))
        try:
            stripe = StripeConfig(directories=tuple(crashed / name for name in self.further))
            with ParameterStore.open(path, replace(CONFIG, stripe=stripe), at=at) as store:
                failures = store.verify().failures
                if failures:
                    return failures[0]
                if store.last_commit.generation != generation:
                    return f"generation {store.last_commit.generation}"
                expected = generation - (at is OpenAt.PREVIOUS)
                if store.records_crc32c() != self.crcs[expected]:
                    return f"content is not that of commit {expected}"
        except (StoreError, OSError) as error:
            return str(error)
        return ""

    def states(self, count: int, unsynced: str | None = None) -> Iterator[tuple[CrashState, Promise]]:
        """``count`` states, from the first commit on; with ``unsynced``, of a build that never syncs files whose names
        begin so.
        """
        changes, promises = [], [Promise()]
        for entry in self.log:
            changes.append(as_change(entry, self.directory))
            promises.append(promises[-1].after(entry))
            if unsynced is not None and changes[-1][2] == "fsync" and changes[-1][3].startswith(unsynced):
                changes[-1] = ("end", 0, "", "", 0, b"")
        first = next(cut for cut, promise in enumerate(promises) if promise.generations) - 1
        names = ("run", *self.further)
        directories = [*names, "run/index", *(f"{name}/extents" for name in names)]
        start = CrashState(0, Kind.PREFIX, directories, self.files)
        drawn = crash_states(changes, count, first=first, start=start, promise=promises.__getitem__)
        return ((state, promises[state.cut]) for state in drawn)

    def undo_violation(self, count: int) -> tuple[int, str]:
        """States tried in which the last commit is not acknowledged, and the first that cannot be undone."""
        tried = 0
        for state, promise in self.states(count):
            for generation in promise.generations:
                if generation in self.prepared and (promise.undoable or generation > promise.acknowledged):
                    tried += 1
                    wrong = self.reopen(state, generation, OpenAt.PREVIOUS)
                    if wrong:
                        return tried, f"cut {state.cut}, undoing generation {generation}: {wrong}"
        return tried, ""

    def violation(self, count: int, unsynced: str | None = None) -> tuple[int, str]:
        """States tried, and the first thing found wrong."""
        tried = 0
        for state, promise in self.states(count, unsynced):
            # The next index image is the harder one: it refers to what was written last.
            generation = promise.generations[tried % len(promise.generations)]
            tried += 1
            wrong = self.reopen(state, generation)
            if wrong:
                return tried, f"cut {state.cut}, generation {generation}: {wrong}"
        return tried, ""


@pytest.mark.slow
def test_a_prepared_commit_can_be_undone_until_it_is_acknowledged(fast_path: Path) -> None:
    run = Run(fast_path).record(prepare=True)
    assert run.violation(share(500))[1] == ""
    tried, wrong = run.undo_violation(share(8000))
    assert wrong == ""
    assert tried >= share(100)


def test_letting_the_previous_commit_go_too_early_fails_the_replay(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are free when its removal is durable; freed at the prepare, they are overwritten before that."""
    write_index = Committer._write_index

    def eager(self: Committer, *arguments: object) -> None:
        write_index(self, *arguments)  # type: ignore[arg-type]
        if PREVIOUS in self.snapshots:
            self._parts.live.release(self.snapshots[PREVIOUS].records.rows)
            self.snapshots[PREVIOUS] = Commit(0, CommittedRecords(), {})

    monkeypatch.setattr(Committer, "_write_index", eager)
    run = Run(fast_path)

    def late(store: ParameterStore) -> None:
        store.update({"e0": np.ones(NUMEL, np.float32), "e1": np.ones(NUMEL, np.float32)}, lr=1e-2)
        store.fetch(["e2", "e3"]).release()

    run.meanwhile = late
    run.record(prepare=True)
    monkeypatch.undo()
    assert run.undo_violation(2000)[1] != ""


@pytest.fixture
def record(fast_path: Path) -> Callable[[], Run]:
    return lambda: Run(fast_path).record()


@pytest.mark.slow
def test_a_thousand_crash_states(record: Callable[[], Run], record_property: Callable[..., None]) -> None:
    run = record()
    count = share(1000)
    tried, wrong = run.violation(count)
    assert wrong == ""
    assert tried >= count
    assert len({state.cut for state, _ in run.states(1000)}) > len(run.log) // 2
    record_property("states", tried)


@pytest.mark.slow
def test_crash_states_of_two_drives(fast_path: Path) -> None:
    """Each drive keeps or loses what it will; and a commit that forgot to sync one of them is found out."""
    run = Run(fast_path, further=("b",)).record()
    written = {Path(entry.text).parent.parent.name for entry in run.log if entry.event is Event.WRITE_SUBMIT}
    assert written == {"run", "b"}
    count = share(700)
    tried, wrong = run.violation(count)
    assert wrong == ""
    assert tried >= count
    assert run.violation(700, "b/")[1] != ""


def test_without_fdatasync_the_replay_fails(record: Callable[[], Run]) -> None:
    run = record()
    assert run.violation(1000, "")[1] != ""


def test_without_copy_on_write_the_replay_fails(
    record: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Extent, "shared", lambda self, slot: False)
    run = record()
    monkeypatch.undo()
    assert run.violation(1000)[1] != ""


def test_freeing_slots_before_the_commit_fails_the_replay(
    record: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot freed when it is left behind, not when the commit that leaves it is durable, is overwritten too
    early.
    """
    write = LiveRecord.write

    def eager(self: LiveRecord, group: int, *rest: object) -> int:
        before = self.slot(group)
        ticket = write(self, group, *rest)  # type: ignore[arg-type]
        if before is not None and self.slot(group) != before:
            before.extent.free(before.number)
        return ticket

    def release(self: LiveIndex, rows: Rows) -> None:
        for extent, slots in self._by_extent(rows):
            for slot in slots.tolist():
                extent._references[slot] -= 1

    monkeypatch.setattr(LiveRecord, "write", eager)
    monkeypatch.setattr(LiveIndex, "release", release)
    run = record()
    monkeypatch.undo()
    assert run.violation(1000)[1] != ""
