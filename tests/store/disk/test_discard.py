"""Space that is not needed any more goes back to the file system, and is reserved again before it is used."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest_store import small_store, step_all
from crash_states import Event
from effort import share
from test_crash_replay import Run

from tierstore import _native
from tierstore.capabilities import Capability
from tierstore.store import ParameterStore, StoreConfig, WearConfig
from tierstore.store.committing import Committer
from tierstore.store.disk import extents
from tierstore.store.disk.extents import Discard
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.format import Group

NUMEL = 3000
COUNT = 20
SLOT = {Group.WEIGHTS: 12288, Group.MOMENTS: 2 * 12288}


def config(retain: int, discard: Capability = Capability.ON) -> StoreConfig:
    return StoreConfig(host_budget=4 << 20, retain=retain, wear=WearConfig(discard=discard))


def blocks(store: Path) -> dict[str, int]:
    """Slots' worth of blocks that each extent has."""
    found = {}
    for group, slot in SLOT.items():
        path = store / "extents" / f"expert.{group.label}"
        found[group.label] = os.stat(path).st_blocks * 512 // slot
    return found


@pytest.fixture
def store_of_six(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of 20 records that reserved six copies of them: four snapshots, of which it has one."""
    monkeypatch.setattr(extents, "_WORTH_BYTES", 0)
    path = tmp_path / "store"
    with small_store(path, count=COUNT, numel=NUMEL, budget=4 << 20, retain=4) as store:
        store.commit(snapshot="old")
    assert blocks(path) == {"weights": 6 * COUNT, "moments": 6 * COUNT}
    return path


def test_what_fewer_snapshots_need_no_more_is_given_back(store_of_six: Path) -> None:
    """20 records, one snapshot kept: three copies are needed of the six that there are."""
    with ParameterStore.open(store_of_six, config(retain=1)) as store:
        assert "discard: on" in store.status().effective
        step_all(store, 1e-2)
        store.commit()
        store.core.extents.end_discards()
        assert blocks(store_of_six) == {"weights": 3 * COUNT, "moments": 3 * COUNT}
        for number in range(6):  # the slots that turn around are never among them
            step_all(store, 1e-2)
            store.commit(snapshot=f"s{number}")
            assert blocks(store_of_six) == {"weights": 3 * COUNT, "moments": 3 * COUNT}
        assert store.verify().failures == []


def test_off_gives_nothing_back(store_of_six: Path) -> None:
    with ParameterStore.open(store_of_six, config(retain=0, discard=Capability.OFF)) as store:
        assert "discard: off" in store.status().effective
        step_all(store, 1e-2)
        store.commit()
    assert blocks(store_of_six) == {"weights": 6 * COUNT, "moments": 6 * COUNT}


def test_it_is_reserved_again_before_it_is_used(store_of_six: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given back, then four snapshots again: a disk that is full by then says so before anything changes."""
    with ParameterStore.open(store_of_six, config(retain=1)) as store:
        step_all(store, 1e-2)
        store.commit()
    assert blocks(store_of_six)["weights"] == 3 * COUNT
    with ParameterStore.open(store_of_six, config(retain=4)) as store:
        before = store.records_crc32c()

        def full(self: _native.File, offset: int, nbytes: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", self.path)

        class Full:
            def __init__(self, file: _native.File) -> None:
                self._file = file

            def __getattr__(self, name: str) -> object:
                return getattr(self._file, name)

            def allocate(self, offset: int, nbytes: int) -> None:
                full(self._file, offset, nbytes)

        weights = store.core.extents.of(0, Group.WEIGHTS).extents[0]
        file, weights.file = weights.file, Full(weights.file)  # type: ignore[assignment]
        needed = 6 * COUNT * SLOT[Group.WEIGHTS]  # all of them: what an opened file has is not known
        with pytest.raises(OSError, match=f"{needed} more bytes are needed") as refused:
            step_all(store, 1e-2)
        assert refused.value.filename == str(weights.path)
        weights.file = file
        assert store.records_crc32c() == before
        step_all(store, 1e-2)
        store.commit(snapshot="new")
        assert blocks(store_of_six) == {"weights": 6 * COUNT, "moments": 6 * COUNT}


def test_a_slot_is_not_used_before_its_hole_is_made(store_of_six: Path) -> None:
    with ParameterStore.open(store_of_six, config(retain=4)) as store:
        store.reserve()
        striped = store.core.extents.of(0, Group.WEIGHTS)
        (extent,) = striped.extents
        gate = store.core.engine.external()
        for slot in range(extent.slots):
            extent._reads[slot] = [gate]
        extent.discard(0, Discard(Capability.ON, [store_of_six / "scratch"]))
        punches = list(extent._punches)
        assert punches
        assert not any(map(store.core.engine.done, punches)), "a hole follows the reads of its slots"
        timer = threading.Timer(0.05, lambda: store.core.engine.complete_external(gate))
        timer.start()
        striped.allocate()
        assert all(map(store.core.engine.done, punches))
        timer.join()


@pytest.mark.parametrize("wanted", [Capability.AUTO, Capability.ON])
def test_a_file_system_without_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Capability
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported", str(path))

    monkeypatch.setattr("tierstore.store.disk.extents._try", refuse)
    if wanted is Capability.ON:
        with pytest.raises(OSError, match="not supported"):
            Discard(wanted, [tmp_path])
    else:
        found = Discard(wanted, [tmp_path])
        assert not found
        assert found.describe() == "discard: off (Operation not supported)"


def until_they_are_done(store: ParameterStore) -> None:
    while not all(
        store.core.engine.done(ticket) for extent in store.core.extents.files for ticket in extent._punches
    ):
        time.sleep(0.001)


@pytest.mark.parametrize(
    "meanwhile",
    [until_they_are_done, lambda store: store.core.extents.reserve(8, store.core.live.counts())],
    ids=["done", "reserved"],
)
def test_a_hole_that_fails_stops_further_ones_and_says_so(
    store_of_six: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[ParameterStore], None]
) -> None:
    def punch(self: _native.Engine, file: _native.File, *args: int, after: Sequence[int]) -> int:
        return punched(self, refuses, *args, after=after)

    punched = _native.Engine.punch
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    path = f"/proc/self/fd/{fd}"
    with (
        ParameterStore.open(store_of_six, config(retain=0)) as store,
        _native.File(path, direct=_native.DirectIo.OFF) as refuses,
    ):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)  # nobody can punch it
        monkeypatch.setattr(_native.Engine, "punch", punch)
        step_all(store, 1e-2)
        store.commit()
        monkeypatch.setattr(_native.Engine, "punch", punched)
        meanwhile(store)
        step_all(store, 1e-2)
        store.commit()
        assert f"discard: off ({path}: punching a hole: Operation not permitted)" in store.status().effective
    os.close(fd)


# Crashes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def give_all_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every free slot is punched after every commit, and reserved again for the next."""
    monkeypatch.setattr(extents, "_WORTH_BYTES", 0)
    discard = StoreExtents.discard
    monkeypatch.setattr(StoreExtents, "discard", lambda self, copies, counts: discard(self, 0, counts))


@pytest.mark.slow
def test_holes_in_every_crash_state(fast_path: Path, give_all_back: None) -> None:
    run = Run(fast_path).record()
    assert sum(entry.event is Event.PUNCH_SUBMIT for entry in run.log) > 20
    count = share(1000)
    tried, wrong = run.violation(run.log, count)
    assert wrong == ""
    assert tried >= count


@pytest.mark.slow
def test_holes_in_prepared_commits(fast_path: Path, give_all_back: None) -> None:
    run = Run(fast_path).record(prepare=True)
    assert any(entry.event is Event.PUNCH_SUBMIT for entry in run.log)
    assert run.violation(run.log, share(150))[1] == ""
    tried, wrong = run.undo_violation(share(500))
    assert wrong == ""
    assert tried >= share(20)


def test_a_hole_before_the_commit_is_durable_fails_the_replay(
    fast_path: Path, give_all_back: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the commit is about to leave behind is still what a crash reopens at."""
    write_index = Committer._write_index

    def eager(self: Committer, *arguments: object) -> None:
        live, engine = self._parts.live, self._parts.engine
        changed = live.changed_entries().numbers
        for extent, slots in live._by_extent(live.table.rows[changed[changed < len(live.table)]]):
            for slot in slots.tolist():
                engine.wait(engine.punch(extent.file, slot * extent.slot_bytes, extent.slot_bytes))
        write_index(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Committer, "_write_index", eager)
    run = Run(fast_path).record()
    monkeypatch.undo()
    assert run.violation(run.log, 1000)[1] != ""
