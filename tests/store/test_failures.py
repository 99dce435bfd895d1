"""Full disks, failed writes, other processes, and commits that cannot be: refused, with the last commit
standing.
"""

import errno
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from child_process import child, run_python
from conftest_store import small_store, weights

from tierstore import _native
from tierstore.cache.access import Need, Phase
from tierstore.errors import StoreError, StoreInUseError, StorePoisonedError
from tierstore.store import (
    CacheConfig,
    Group,
    IoBackendName,
    ParameterStore,
    Placement,
    RecordSchema,
    Scope,
    StoreConfig,
)
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.index.live import LiveRecord

NUMEL = 3000
CONFIG = StoreConfig(host_budget=1 << 20)


def ones(*keys: str) -> dict[str, np.ndarray]:
    return {key: np.ones(NUMEL, np.float32) for key in keys}


def register_many(store: ParameterStore, count: int) -> None:
    for number in range(count):
        store.register(f"new{number}", "expert", weight=weights(1, NUMEL)["e0"])


def leave_access(store: ParameterStore, records: list[LiveRecord]) -> None:
    for _ in store.core.access(Phase.USER, 0, records, Need.STEP):
        raise ZeroDivisionError


# A full disk ------------------------------------------------------------------------------------------------


def test_full_disk(small_disk: Path) -> None:
    path = small_disk / "store"
    with small_store(path) as store:
        store.update(ones("e1"), lr=0.1)
        crc, generation = store.records_crc32c(), store.commit()
        filler = small_disk / "filler"
        free = os.statvfs(small_disk)
        with open(filler, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, (free.f_bavail - 40) * free.f_frsize)
        with pytest.raises(OSError, match=r"\d+ more bytes are needed and \d+ are free") as caught:
            store.reserve({"expert": 100})
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(path / "extents" / "expert.weights")
        with pytest.raises(OSError, match="needed") as caught:
            register_many(store, 100)
        assert caught.value.errno == errno.ENOSPC
        added = [key for key in store.keys if key.startswith("new")]
        # What space was reserved for goes on working, to the end.
        store.update(ones("e0", "e2", *added), lr=0.1)
        assert store.commit() == generation + 1
        crc = store.records_crc32c()
        store.update(ones("e0", "e1", "e2", "e3"), lr=0.1)
    with ParameterStore.open(path, CONFIG) as store:
        assert (store.last_commit.generation, store.records_crc32c()) == (generation + 1, crc)
        assert store.verify().failures == []
        filler.unlink()
        store.reserve({"expert": 40})
        store.register("more", "expert")
        store.update(ones("more"), lr=0.1)
        assert store.commit() == generation + 2


def test_full_disk_at_creation_leaves_nothing(small_disk: Path) -> None:
    before = sorted(small_disk.iterdir())
    with (
        pytest.raises(OSError, match="needed") as caught,
        ParameterStore.create(small_disk / "store", [RecordSchema("expert", NUMEL)], CONFIG) as store,
    ):
        store.reserve({"expert": 1000})
    assert caught.value.errno == errno.ENOSPC
    assert sorted(small_disk.iterdir()) == before


def test_holes_are_filled_before_they_are_written(tmp_path: Path) -> None:
    """A copied store may be sparse: free slots without blocks are not taken for reserved space."""
    with small_store(tmp_path / "store") as store:
        extent = tmp_path / "store" / "extents" / "expert.weights"
        free = store.core.extents.of(0, Group.WEIGHTS).extents[0]._free.array().tolist()
        slot_bytes = store.info("e0").schema.layout(Group.WEIGHTS).slot_bytes
        for slot in free:
            store.core.extents.of(0, Group.WEIGHTS).extents[0].file.punch(slot * slot_bytes, slot_bytes)
        holes = extent.stat().st_blocks
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        store.update(ones("e0"), lr=0.1)
        assert extent.stat().st_blocks > holes


# A failed write ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [IoBackendName.THREADS, IoBackendName.AUTO])
def test_failed_write_poisons(tmp_path: Path, backend: IoBackendName) -> None:
    """Writes past RLIMIT_FSIZE fail with EFBIG, as a broken drive's would with EIO."""
    small_store(tmp_path / "store").close()
    script = f"""
import numpy as np, resource, signal, sys
from tierstore.errors import StorePoisonedError
from tierstore.store import *
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
config = StoreConfig(host_budget=1 << 20, io=IoConfig(backend=IoBackendName.{backend.name}))
with ParameterStore.open({str(tmp_path / "store")!r}, config) as store:
    store.reserve()
    store.update({{"e0": np.ones({NUMEL}, np.float32)}}, lr=0.1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        store.commit()
        sys.exit("committed")
    except OSError as error:
        assert error.errno == 27 and "expert." in error.filename, error
    for use in (lambda: store.fetch(["e1"]), store.commit, store.records_crc32c, store.verify):
        try:
            use()
            sys.exit("used")
        except StorePoisonedError as error:
            assert "reopen" in str(error)
"""
    run_python(script)
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.last_commit.generation == 1
        assert store.verify().failures == []
        with store.fetch(["e0"]) as lease:
            assert (lease["e0"].copy("weight") == weights(4, NUMEL)["e0"]).all()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_interrupted_commit_poisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs may have been queued that no later commit would wait for."""
    with small_store(tmp_path / "store") as store:
        store.update(ones("e0"), lr=0.1)

        def interrupt(self: StoreExtents) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(StoreExtents, "take_unsynced_directories", interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.commit()
        with pytest.raises(StorePoisonedError, match="a commit failed: KeyboardInterrupt"):
            store.commit()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.last_commit.generation == 1


def test_interrupted_update_poisons(tmp_path: Path) -> None:
    class Bomb(dict[str, np.ndarray]):
        asked = 0

        def __getitem__(self, key: str) -> np.ndarray:
            Bomb.asked += 1
            if Bomb.asked > 5:  # after the checks of all four and one step
                raise KeyboardInterrupt
            return super().__getitem__(key)

    with small_store(tmp_path / "store") as store:
        with pytest.raises(KeyboardInterrupt):
            store.update(Bomb(ones("e0", "e1", "e2", "e3")), lr=0.1)
        for use in (store.commit, lambda: store.update({}, lr=0.1)):
            with pytest.raises(StorePoisonedError, match="optimizer step 1 was cut short"):
                use()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.status().steps == 0


# Commits that cannot be -------------------------------------------------------------------------------------


def test_commit_under_a_lease_of_caught_up_records(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        with store.fetch(["e1"]):
            store.commit()  # it is clean
        store.update(ones("e0"), lr=0.1)
        with store.fetch(["e1"]):
            with pytest.raises(StoreError, match="'e1' was caught up under a lease"):
                store.commit()
            assert store.last_commit.generation == 2
        crc, generation = store.records_crc32c(), store.commit()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (store.last_commit.generation, store.records_crc32c()) == (generation, crc)


def test_direct_record_must_be_written(tmp_path: Path) -> None:
    schema = RecordSchema("dense", NUMEL, placement=Placement.DIRECT)
    with ParameterStore.create(tmp_path / "store", [schema], CONFIG) as store:
        store.register("d", "dense")
        with pytest.raises(StoreError, match="'d' is held by its owner"):
            store.commit()


def test_a_late_read_of_a_slot_left_behind_meets_its_own_checksums(tmp_path: Path) -> None:
    """A read ahead that nobody waits for may still be queued when its record is written to a new slot."""
    with small_store(tmp_path / "store") as store:
        record = store.core.record("e0")
        arena = _native.Arena(1 << 16, _native.HugePages.OFF)
        late = store.core.engine.external()
        read = record.read(
            Group.WEIGHTS,
            [_native.Buffer(arena, [(0, 12288)], 4 * NUMEL)],
            [late],
            _native.Priority.SPECULATIVE,
        )
        store.update(ones("e0"), lr=0.1)
        store.core.cache.clean()
        with pytest.raises(TimeoutError):
            store.core.engine.wait(store.core.cache.write_backs.take()[0], 0.05)
        store.core.engine.complete_external(late)
        store.core.wait([read])


def test_access_left_in_the_middle(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", budget=50_000) as store:
        records = [store.core.record(f"e{i}") for i in range(4)]
        with pytest.raises(ZeroDivisionError):
            leave_access(store, records[:1])
        store.commit()
        with pytest.raises(ZeroDivisionError):
            leave_access(store, records)
        with pytest.raises(StorePoisonedError, match="left before its end"):
            store.commit()


def test_big_state_makes_the_index_grow(tmp_path: Path) -> None:
    state = {"big": os.urandom(5 << 20)}
    with small_store(tmp_path / "store", retain=2) as store:
        store.commit(state)
        store.commit(snapshot="s")
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.last_commit.state["big"] == state["big"]


def test_retention_and_space(tmp_path: Path) -> None:
    """With R snapshots, 2 + R copies are reserved, and that is always enough."""
    with small_store(tmp_path / "store", retain=3) as store:
        allocated = store.core.extents.allocated_bytes
        slot_bytes = sum(store.info("e0").schema.layout(g).slot_bytes for g in (Group.WEIGHTS, Group.MOMENTS))
        assert allocated == 4 * 5 * slot_bytes
        for number in range(8):
            store.update(ones("e0", "e1", "e2", "e3"), lr=0.1)
            store.commit(snapshot=f"s{number}")
            assert store.last_commit.snapshots == [f"s{i}" for i in range(max(0, number - 2), number + 1)]
            store.update(ones("e0", "e1", "e2", "e3"), lr=0.1)
            store.commit()
        with pytest.raises(StoreError, match="exists already"):
            store.commit(snapshot="s7")
        assert store.core.extents.allocated_bytes == allocated
        assert store.verify().snapshots == 3
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.last_commit.snapshots == ["s5", "s6", "s7"]
        assert store.verify().failures == []


def test_scope_layer(tmp_path: Path) -> None:
    config = StoreConfig(host_budget=200_000, cache=CacheConfig(scope=Scope.LAYER), layers=(1, 3))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], config) as store:
        with pytest.raises(ValueError, match="layer 0 has no quota"):
            store.register("a", "expert")
        for key, weight in weights(6, NUMEL).items():
            store.register(key, "expert", layer=1 + 2 * (int(key[1]) % 2), weight=weight)
        store.update(ones("e0", "e1"), lr=0.1)
        with store.fetch(["e0", "e1", "e4", "e5"]) as lease:
            assert len(lease) == 4
        crc = store.records_crc32c()
        store.commit()
    reopened = StoreConfig(host_budget=200_000, cache=CacheConfig(scope=Scope.LAYER))
    with ParameterStore.open(tmp_path / "store", reopened) as store:
        assert store.config.layers == (1, 3)
        assert store.records_crc32c() == crc


# Other processes --------------------------------------------------------------------------------------------


def test_second_opener_is_told_the_pid(tmp_path: Path) -> None:
    script = f"""
import sys
from tierstore.store import *
with ParameterStore.open({str(tmp_path / "store")!r}, StoreConfig(host_budget=1 << 20)):
    print("open", flush=True)
    sys.stdin.read()
"""
    small_store(tmp_path / "store").close()
    with child(script) as holder:
        assert holder.answer() == "open"
        with pytest.raises(StoreInUseError, match=rf"pid {holder.pid}\)"):
            ParameterStore.open(tmp_path / "store", CONFIG)
        holder.send_signal(signal.SIGKILL)
        # Dead, but its parent has not collected it: a zombie holds nothing, whatever /proc says of it.
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
        ParameterStore.open(tmp_path / "store", CONFIG).close()
    with small_store(tmp_path / "other"), pytest.raises(StoreInUseError, match=f"pid {os.getpid()}"):
        ParameterStore.open(tmp_path / "other", CONFIG)


def test_forked_child_leaves_the_store_alone(tmp_path: Path) -> None:
    script = f"""
import os, sys
from tierstore.errors import StoreError, StoreInUseError
from tierstore.store import *
path, config = {str(tmp_path / "store")!r}, StoreConfig(host_budget=1 << 20)
with ParameterStore.open(path, config) as store:
    pid = os.fork()
    if pid == 0:
        try:
            store.commit()
        except StoreError as error:
            store.close()
            os._exit(0 if "fork" in str(error) else 2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    try:
        ParameterStore.open(path, config)
        sys.exit("the child let the lease go")
    except StoreInUseError:
        pass
    store.commit()
"""
    small_store(tmp_path / "store").close()
    run_python(script)
