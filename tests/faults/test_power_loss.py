"""Ten thousand power cuts: whatever the disk holds then, the store reopens at an acknowledged commit, whole.

``tests/store/test_crash_replay.py`` replays the engine's own log with LMDB's transactions taken as atomic. Here the
log is that of a file system below the whole store, with the index's writes, names and sizes in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from faultfs import FaultFs, unavailable
from power_loss import CrashState, Event, crash_states, empty, without

from tierstore import _native
from tierstore.errors import StoreError, StoreMissingError
from tierstore.store import IoBackendName, IoConfig, OpenAt, ParameterStore, RecordSchema, StoreConfig
from tierstore.store.format import COMMITTED_GROUPS, Group, RecordEntry
from tierstore.store.index import Commit

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "FUSE can be mounted")

NUMEL = 1500
RECORDS = 5
STATES = 2100
# One thread each: a store is opened ten thousand times here.
IO = IoConfig(backend=IoBackendName.THREADS, threads=1, compute_threads=1)
OPEN = StoreConfig(host_budget=60_000, io=IO)
RUN = StoreConfig(host_budget=60_000, io=IoConfig(compute_threads=1))
SCHEMAS = [RecordSchema("expert", NUMEL), RecordSchema("other", 700)]


@dataclass
class Begun:
    """A commit: where in the log its call began and ended, and what was to be found after it."""

    generation: int
    began: int
    ended: int
    commit: Commit
    snapshots: dict[str, Commit]
    acknowledging: int = 0  # where in the log its acknowledgement began; 0: it needs none


@dataclass
class Run:
    """A store that is worked on over a file system that keeps the log of all it is asked."""

    fs: FaultFs
    store: ParameterStore
    rng: np.random.Generator
    commits: list[Begun] = field(default_factory=list)
    prepared: bool = False

    def update(self, steps: int = 1) -> None:
        for _ in range(steps):
            keys = [key for key in self.store.keys if self.rng.random() < 0.4]
            sizes = {key: self.store.schema_of(key).numel for key in keys}
            self.store.update(
                {key: self.rng.standard_normal(n).astype(np.float32) for key, n in sizes.items()}, lr=1e-2
            )

    def register(self, prefix: str, count: int, schema: str = "expert") -> None:
        numel = next(s.numel for s in SCHEMAS if s.name == schema)
        for number in range(count):
            weight = self.rng.standard_normal(numel).astype(np.float32)
            self.store.register(f"{prefix}{number}", schema, weight=weight)

    def commit(self, state: bytes = b"", snapshot: str | None = None) -> None:
        began = self.fs.log_length
        take = self.store.prepare if self.prepared else self.store.commit
        generation = take({"n": state}, snapshot=snapshot)
        committer = self.store._committer
        commit = Commit(generation, dict(committer.table), dict(committer.state))
        self.commits.append(Begun(generation, began, self.fs.log_length, commit, dict(committer.snapshots)))

    def acknowledge(self) -> None:
        self.commits[-1].acknowledging = self.fs.log_length
        self.store.acknowledge()


def plain(run: Run) -> None:
    for number in range(10):
        run.update(1 + number % 3)
        run.commit(b"%d" % number)


def retained(run: Run) -> None:
    for number in range(9):
        run.update(1 + number % 2)
        run.commit(b"%d" % number, snapshot=f"s{number}" if number % 2 else None)


def prepared(run: Run) -> None:
    run.prepared = True
    for number in range(8):
        run.update(1 + number % 2)
        run.commit(b"%d" % number, snapshot=f"s{number}" if number == 3 else None)
        run.acknowledge()


def growing(run: Run) -> None:
    """Records and state are added: extents and the index grow."""
    for number in range(4):
        run.register(f"f{number}.", 2, "other" if number % 2 else "expert")
        run.update()
        run.commit(run.rng.bytes(150_000 * number))


def created(run: Run) -> None:
    """Nothing but the making of it, and a commit more."""
    run.update()
    run.commit(b"1")


WORKLOADS = [plain, retained, prepared, growing, created]


def record(directory: Path, work: Callable[[Run], None]) -> tuple[list[Event], list[Begun]]:
    with FaultFs(directory / "fs", keep_log=True) as fs:
        with ParameterStore.create(fs.mount / "s", SCHEMAS, RUN_WITH_SNAPSHOTS) as store:
            run = Run(fs, store, np.random.default_rng(5))
            run.register("e", RECORDS)
            run.commit()
            work(run)
        return fs.log(), run.commits


RUN_WITH_SNAPSHOTS = StoreConfig(host_budget=60_000, retain=2, io=IoConfig(compute_threads=1))


def damage(state: CrashState, table: dict[str, RecordEntry]) -> str:
    """The first section of ``table`` that the disk does not hold as it was written."""
    for key, entry in table.items():
        schema = SCHEMAS[entry.schema]
        for group, location in zip(COMMITTED_GROUPS, entry.groups, strict=True):
            layout = schema.layout(Group(group))
            at = location.slot * layout.slot_bytes
            extent = state.files[f"s/extents/{schema.name}.{group.label}"]
            for section, crc in zip(layout.sections, location.crcs, strict=True):
                content = np.frombuffer(extent.read(at, section.nbytes), np.uint8)
                if _native.crc32c(content, 0) != crc:
                    return f"record {key!r}, section {section.name}"
                at += section.padded_nbytes
    return ""


def wrong_with(root: Path, state: CrashState, commits: list[Begun]) -> str:
    """What is wrong with the store that ``state`` leaves; empty when it is an acknowledged commit, or the next."""
    acknowledged = max((c.generation for c in commits if c.ended <= state.cut), default=0)
    begun = [c for c in commits if c.began < state.cut and c.generation >= acknowledged]
    empty(root)
    state.write(root)
    try:
        with ParameterStore.open(root / "s", OPEN) as store:
            committer = store._committer
            wanted = [c for c in begun if c.generation == store.generation]
            if not wanted:
                return f"generation {store.generation}, acknowledged {acknowledged}"
            (commit,) = wanted
            if (committer.table, committer.state) != (commit.commit.records, commit.commit.state):
                return f"not what commit {commit.generation} was"
            tables = [committer.table]
            for name, snapshot in committer.snapshots.items():
                if name in commit.snapshots and snapshot != commit.snapshots[name]:
                    return f"snapshot {name!r} is not what it was"
                tables.append(snapshot.records)
            return next(filter(None, (damage(state, table) for table in tables)), "")
    except StoreMissingError as error:
        return str(error) if acknowledged else ""
    except (StoreError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def violation(
    directory: Path, log: list[Event], commits: list[Begun], count: int, first: int = 0
) -> tuple[int, str]:
    """States tried, and the first thing found wrong."""
    root, tried = directory / "crashed", 0
    root.mkdir(exist_ok=True)
    for state in crash_states(log, count, 0, first):
        tried += 1
        wrong = wrong_with(root, state, commits)
        if wrong:
            return tried, f"cut {state.cut}: {wrong}"
    return tried, ""


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: str(work.__name__))
def test_power_cuts(
    fast_path: Path, work: Callable[[Run], None], record_property: Callable[..., None]
) -> None:
    log, commits = record(fast_path, work)
    # The making of a store is tried in a workload of its own.
    first = 0 if work is created else commits[0].ended
    tried, wrong = violation(fast_path, log, commits, STATES, first)
    assert wrong == ""
    assert tried >= STATES
    record_property("states", tried)


def test_a_prepared_commit_can_be_undone_after_a_power_cut(fast_path: Path) -> None:
    """Until its acknowledgement has begun; also where the cut met the prepare, and it has landed by chance."""
    log, commits = record(fast_path, prepared)
    root, tried = fast_path / "crashed", 0
    root.mkdir()
    for state in crash_states(log, 1000, 1, commits[1].began):
        empty(root)
        state.write(root)
        with ParameterStore.open(root / "s", OPEN) as store:
            found = store.generation
        (last,) = (c for c in commits if c.generation == found)
        if 0 < last.acknowledging < state.cut or found == 1:
            continue
        tried += 1
        assert undone(root, state, commits, found - 1) == "", state.cut
    assert tried >= 40


def undone(root: Path, state: CrashState, commits: list[Begun], generation: int) -> str:
    """What is wrong with going back to ``generation``."""
    (wanted,) = (c.commit for c in commits if c.generation == generation)
    empty(root)
    state.write(root)
    with ParameterStore.open(root / "s", OPEN, at=OpenAt.PREVIOUS) as store:
        committer = store._committer
        if (committer.table, committer.state) != (wanted.records, wanted.state):
            return f"not what commit {generation} was"
        return damage(state, committer.table)


@pytest.mark.parametrize(
    ("work", "op", "path"),
    [
        (plain, "fsync", "expert.weights"),
        (plain, "fsync", "expert.moments"),
        (plain, "fsync", "data.mdb"),
        (created, "fsync", "tierstore.json.new"),
        (created, "fsyncdir", "/index"),
        (created, "fsyncdir", "/extents"),
        (created, "fsyncdir", "s"),  # before the identity's rename, and after it
        (growing, "fsync", "other.weights"),
    ],
)
def test_without_this_sync_the_replay_fails(
    fast_path: Path, work: Callable[[Run], None], op: str, path: str
) -> None:
    """Each sync that a commit makes is needed: a log without it has states that lose the commit."""
    log, commits = record(fast_path, work)
    kept = without(log, op, path)
    assert len(kept) < len(log)
    # Cuts are positions in the log: those of commits move with what is left out.
    gone = np.cumsum([event[2] == op and event[3].endswith(path) for event in log])

    def moved(at: int) -> int:
        return at - int(gone[at - 1]) if at else 0

    for commit in commits:
        commit.began, commit.ended = moved(commit.began), moved(commit.ended)
    assert violation(fast_path, kept, commits, STATES)[1] != ""
