"""Promise 3: whatever instant the power fails at, the store reopens at an acknowledged commit, whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store
from crash_states import CrashState, Entry, Event, crash_states, read_log, without_syncs
from effort import share

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
        self.sizes: dict[Path, int] = {}
        #: What was found right before: half of a thousand states are repeats.
        self._right: set[Hashable] = set()
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
                self.sizes[file.relative_to(self.directory)] = file.stat().st_size
        return self

    def _image(self, store: ParameterStore) -> bytes:
        # What is zero at its end is so again when the file is made as long as it was.
        return (store.directory / "index" / "data.mdb").read_bytes().rstrip(b"\0")

    def _committed(self, store: ParameterStore) -> None:
        self.images[store.last_commit.generation] = self._image(store)
        # This catches records up and evicts some: writes that belong to no commit yet are in the log too.
        self.crcs[store.last_commit.generation] = store.records_crc32c()

    def reopen(self, state: CrashState, generation: int) -> str:
        """What is wrong with the store that ``state`` leaves; empty when it is the commit it should be."""
        return self._reopen(state, generation, self.images[generation], OpenAt.LAST)

    def go_back(self, state: CrashState, generation: int) -> str:
        """What is wrong with the store when commit ``generation``, prepared, is undone."""
        return self._reopen(state, generation, self.prepared[generation], OpenAt.PREVIOUS)

    def _reopen(self, state: CrashState, generation: int, image: bytes, at: OpenAt) -> str:
        known = state.digest(), state.acknowledged, generation, at
        if known not in self._right:
            wrong = self._wrong_with(state, generation, image, at)
            if wrong:
                return wrong
            self._right.add(known)
        return ""

    def _wrong_with(self, state: CrashState, generation: int, image: bytes, at: OpenAt) -> str:
        crashed = self.directory / "crashed"
        path = crashed / "run"
        if not path.exists():
            (path / "index").mkdir(parents=True)
            for name in ("run", *self.further):
                (crashed / name / "extents").mkdir(parents=True)
                shutil.copy(self.directory / name / "tierstore.json", crashed / name)
        with open(path / "index" / "data.mdb", "wb") as file:
            file.write(image)
            file.truncate(max(file.tell(), 1 << 20))
        for name, size in self.sizes.items():
            with open(crashed / name, "wb") as file:
                file.truncate(size)
                for page, data in state.pages.get(str(self.directory / name), {}).items():
                    file.seek(page * 4096)
                    file.write(data)
        try:
            stripe = StripeConfig(directories=tuple(crashed / name for name in self.further))
            with ParameterStore.open(path, replace(CONFIG, stripe=stripe), at=at) as store:
                failures = store.verify().failures
                if failures:
                    return failures[0]
                if (
                    store.last_commit.generation != generation
                    or store.last_commit.generation < state.acknowledged
                ):
                    return f"generation {store.last_commit.generation}, acknowledged {state.acknowledged}"
                expected = generation - (at is OpenAt.PREVIOUS)
                if store.records_crc32c() != self.crcs[expected]:
                    return f"content is not that of commit {expected}"
        except (StoreError, OSError) as error:
            return str(error)
        return ""

    def undo_violation(self, count: int) -> tuple[int, str]:
        """States tried in which the last commit is not acknowledged, and the first that cannot be undone."""
        tried = 0
        for state in crash_states(self.log, count, 0):
            for generation in state.generations:
                if generation in self.prepared and (state.unacknowledged or generation > state.acknowledged):
                    tried += 1
                    wrong = self.go_back(state, generation)
                    if wrong:
                        return tried, f"cut {state.cut}, undoing generation {generation}: {wrong}"
        return tried, ""

    def violation(self, log: list[Entry], count: int, seed: int = 0) -> tuple[int, str]:
        """States tried, and the first thing found wrong."""
        tried = 0
        for state in crash_states(log, count, seed):
            # The next index image is the harder one: it refers to what was written last.
            generation = state.generations[tried % len(state.generations)]
            tried += 1
            wrong = self.reopen(state, generation)
            if wrong:
                return tried, f"cut {state.cut}, generation {generation}: {wrong}"
        return tried, ""


@pytest.mark.slow
def test_a_prepared_commit_can_be_undone_until_it_is_acknowledged(fast_path: Path) -> None:
    run = Run(fast_path).record(prepare=True)
    assert run.violation(run.log, share(500))[1] == ""
    tried, wrong = run.undo_violation(share(2000))
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
    tried, wrong = run.violation(run.log, count)
    assert wrong == ""
    assert tried >= count
    assert {state.cut for state in crash_states(run.log, 1000, 0)} >= set(
        range(len(run.log) // 2, len(run.log))
    )
    record_property("states", tried)


@pytest.mark.slow
def test_crash_states_of_two_drives(fast_path: Path) -> None:
    """Each drive keeps or loses what it will; and a commit that forgot to sync one of them is found out."""
    run = Run(fast_path, further=("b",)).record()
    written = {Path(entry.text).parent.parent.name for entry in run.log if entry.event is Event.WRITE_SUBMIT}
    assert written == {"run", "b"}
    count = share(700)
    tried, wrong = run.violation(run.log, count)
    assert wrong == ""
    assert tried >= count
    assert run.violation(without_syncs(run.log, str(fast_path / "b")), 700)[1] != ""


def test_without_fdatasync_the_replay_fails(record: Callable[[], Run]) -> None:
    run = record()
    assert run.violation(without_syncs(run.log), 1000)[1] != ""


def test_without_copy_on_write_the_replay_fails(
    record: Callable[[], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Extent, "shared", lambda self, slot: False)
    run = record()
    monkeypatch.undo()
    assert run.violation(run.log, 1000)[1] != ""


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
    assert run.violation(run.log, 1000)[1] != ""
