"""A store that is opened to read: by several at once, beside no writer, and without a byte of it written."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from child_process import child, run_python
from conftest_store import fingerprint, read_only, small_store, weights

from tierstore.bench.soak_plan import committed_generation
from tierstore.errors import BudgetError, ConfigError, StoreError, StoreInUseError
from tierstore.machine import MemoryAccount
from tierstore.store import Group, ParameterStore, RecordSchema, StoreConfig, StripeConfig, verify_store
from tierstore.store.committing import Keep
from tierstore.store.config import StoreAccess
from tierstore.store.disk import extents, lease
from tierstore.store.gc import Mode, collect
from tierstore.store.opening import minimum_host_budget, minimum_reading_budget
from tierstore.store.parameter_store import open_to_read, verify_all
from tierstore.store.reading import OpenAt, read_drives, read_schemas, read_states, read_summary

READ = StoreAccess.READ
CONFIG = StoreConfig(host_budget=1 << 20)

_READER = """
import sys
from pathlib import Path
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.config import StoreAccess
with ParameterStore.open(Path(sys.argv[1]), StoreConfig(host_budget=1 << 20), access=StoreAccess.READ) as store:
    with store.fetch([key for key in store.keys if store.core.records.live(key).cached]) as lease:
        print("open", float(sum(lease[key].view("weight").sum() for key in lease)), flush=True)
    sys.stdin.read()
"""


@contextmanager
def reader(store: Path) -> Iterator[tuple[int, str]]:
    """A process that has read all of ``store`` and keeps it open: its pid, and the sum of all weights."""
    with child(_READER, store) as process:
        said = process.answer().split()
        assert said[:1] == ["open"]
        yield process.pid, said[1]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    small_store(tmp_path / "store").close()
    return tmp_path / "store"


def total() -> float:
    return float(sum(weight.sum() for weight in weights(4, 3000).values()))


def test_two_read_at_once_and_a_trainer_is_refused_by_name(store: Path) -> None:
    before = fingerprint(store)
    with reader(store) as (first, one), reader(store) as (second, other):
        assert one == other
        assert float(one) == pytest.approx(total())
        with pytest.raises(
            StoreInUseError, match=rf"open to read in another process \(pid ({first}|{second})\)"
        ):
            ParameterStore.open(store, CONFIG)
        with pytest.raises(StoreInUseError, match=rf"pid ({first}|{second})"):
            collect(store, Mode.REMOVE)
        with ParameterStore.open(store, CONFIG, access=READ) as third:
            assert len(third.keys) == 4
        assert read_summary(store).records == {"expert": 4}
        assert fingerprint(store) == before
    assert fingerprint(store) == before
    ParameterStore.open(store, CONFIG).close()


def test_a_reader_is_refused_by_the_writers_pid(store: Path) -> None:
    with ParameterStore.open(store, CONFIG):
        for attempt in (lambda: ParameterStore.open(store, CONFIG, access=READ), lambda: read_summary(store)):
            with pytest.raises(StoreInUseError, match=rf"open in another process \(pid {os.getpid()}\)"):
                attempt()


def test_a_killed_reader_leaves_nothing(store: Path) -> None:
    before = fingerprint(store)
    with reader(store) as (pid, _):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # a zombie holds nothing
        assert fingerprint(store) == before
        ParameterStore.open(store, CONFIG).close()


def test_a_reader_that_the_kernel_does_not_name(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another container: /proc/locks leaves it out."""
    hidden = store.parent / "locks"
    hidden.write_text("1: POSIX  ADVISORY  WRITE 1 00:01:5 0 EOF\n")
    monkeypatch.setattr(lease, "_LOCKS", hidden)
    with ParameterStore.open(store, CONFIG, access=READ):
        with pytest.raises(StoreInUseError, match="in a process that the kernel does not name here"):
            lease.DirectoryLease(store, patience_s=0.05)
        hidden.unlink()
        with pytest.raises(StoreInUseError, match="in a process that the kernel does not name here"):
            lease.DirectoryLease(store, patience_s=0.0)


def test_whatever_would_change_it_is_refused_by_one_error(store: Path) -> None:
    before = fingerprint(store)
    with ParameterStore.open(store, CONFIG, access=READ) as opened:
        key = opened.keys[0]
        gradient = np.ones(3000, np.float32)
        for attempt in (
            lambda: opened.commit(),
            lambda: opened.commit(snapshot="kept"),
            lambda: opened.update({key: gradient}, lr=0.1),
            lambda: opened.reserve(),
            lambda: opened.register("new", "expert"),
            lambda: opened.core.reserve_scratch("expert"),
            lambda: opened.core.committer.acknowledge(),
        ):
            with pytest.raises(StoreError, match=r"the store was opened to read \(StoreAccess.READ\)"):
                attempt()
        with opened.fetch([key], [Group.WEIGHTS, Group.MOMENTS]) as lease_:  # and it goes on
            assert lease_[key].view("weight").tolist() == weights(4, 3000)[key].tolist()
    assert fingerprint(store) == before


def test_only_its_last_commit_as_it_is(store: Path) -> None:
    with pytest.raises(StoreError, match="there is no prepared commit to go back from"):
        ParameterStore.open(store, CONFIG, access=READ, at=OpenAt.PREVIOUS)
    with pytest.raises(StoreError, match="cannot get new schemas"):
        ParameterStore.open(store, CONFIG, access=READ, further=[RecordSchema("other", 100)])


def test_a_prepared_commit_is_read_around_and_stays(store: Path) -> None:
    """What ``OpenAt.PREVIOUS`` reads is what a writer who goes back finds."""
    with ParameterStore.open(store, CONFIG) as opened:
        opened.update({"e0": np.ones(3000, np.float32)}, lr=0.1)
        opened.core.committer.commit(keep=Keep.PREVIOUS)
        prepared = opened.records_crc32c()
    before = fingerprint(store)
    found = []
    for at in (OpenAt.PREVIOUS, OpenAt.LAST):
        with open_to_read(store, at) as opened:
            assert opened.verify().failures == []
            found.append((opened.last_commit.generation, opened.records_crc32c()))
            with opened.fetch(["e0"]) as held:
                unchanged = held["e0"].view("weight").tolist() == weights(4, 3000)["e0"].tolist()
            assert unchanged is (at is OpenAt.PREVIOUS)
    assert fingerprint(store) == before
    with ParameterStore.open(store, CONFIG, at=OpenAt.PREVIOUS) as back:
        assert found == [(1, back.records_crc32c()), (2, prepared)]


def whatever_reads(store: Path) -> list[object]:
    """The results of all that only reads a store, but for what needs a model."""
    verified = verify_store(store)
    assert verified.failures == []
    return [
        verified.records,
        read_schemas(store),
        read_states(store, "name"),
        [(drive.path, drive.used_bytes) for drive in read_drives(store)],
        read_summary(store),
        collect(store, Mode.DRY_RUN).nbytes,
        committed_generation(store),
    ]


@pytest.mark.parametrize("leased", [True, False])
def test_whatever_only_reads_writes_nothing(tmp_path: Path, leased: bool) -> None:
    """On a read-only volume, beside a reader, and where the lease is missing."""
    stripe = StripeConfig(directories=(tmp_path / "disk/b",))
    with small_store(tmp_path / "disk/store", count=8, stripe=stripe) as made:
        made.update({"e0": np.ones(3000, np.float32)}, lr=0.1)  # the others miss it
        made.commit({"name": b"value"})
    if not leased:
        (tmp_path / "disk/store/lease").unlink()
        (tmp_path / "disk/b/lease").unlink()
    store = tmp_path / "disk/store"
    with read_only(tmp_path / "disk"):
        before = fingerprint(tmp_path / "disk")
        found = whatever_reads(store)
        with ParameterStore.open(store, CONFIG, access=READ):
            assert whatever_reads(store) == found
        assert fingerprint(tmp_path / "disk") == before
    assert found[:1] + found[2:3] + found[6:] == [8, {OpenAt.LAST: b"value"}, 2]


_NOT_A_BYTE = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no byte of a file can be written
from tierstore.store import verify_store
from tierstore.store.gc import Mode, collect
store = Path(sys.argv[1])
print(verify_store(store).failures, collect(store, Mode.REMOVE).nbytes > 0, verify_store(store).failures)
"""


def test_a_full_disk_can_be_verified_and_freed(store: Path) -> None:
    """Real errors of system calls: EFBIG, as ENOSPC would be."""
    with ParameterStore.open(store, CONFIG) as opened:
        opened.reserve({"expert": 100})
    used = sum(file.stat().st_blocks for file in (store / "extents").iterdir())
    done = run_python(_NOT_A_BYTE, store)
    assert (done.stdout, done.stderr) == ("[] True []\n", "")
    assert sum(file.stat().st_blocks for file in (store / "extents").iterdir()) * 10 < used


def test_all_of_its_directories_are_read_and_none_is_added(tmp_path: Path) -> None:
    stripe = StripeConfig(directories=(tmp_path / "b",))
    small_store(tmp_path / "store", count=8, stripe=stripe).close()
    before = [fingerprint(tmp_path / name) for name in ("store", "b")]
    with ParameterStore.open(tmp_path / "store", CONFIG, access=READ) as opened:
        with opened.fetch(opened.keys) as held:
            assert float(sum(held[key].view("weight").sum() for key in held)) == pytest.approx(
                float(sum(weight.sum() for weight in weights(8, 3000).values()))
            )
        with pytest.raises(StoreInUseError, match=f"pid {os.getpid()}"):
            lease.DirectoryLease(tmp_path / "b", patience_s=0.0)
    wider = StoreConfig(stripe=StripeConfig(directories=(tmp_path / "b", tmp_path / "c")))
    with pytest.raises(ConfigError, match="is opened to read, and has no directory"):
        ParameterStore.open(tmp_path / "store", wider, access=READ)
    assert [fingerprint(tmp_path / name) for name in ("store", "b")] == before
    assert not (tmp_path / "c").exists()


def test_from_files_and_directories_that_cannot_be_written(store: Path) -> None:
    """As root permissions mean nothing: there the test shows that reading works, elsewhere that it needs no more."""
    paths = [store, *store.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        before = fingerprint(store)
        with ParameterStore.open(store, CONFIG, access=READ) as opened:
            assert opened.verify().failures == []
            assert opened.records_crc32c()
        assert fingerprint(store) == before
    finally:
        for path in paths:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_on_a_file_system_that_is_mounted_read_only(small_disk: Path) -> None:
    small_store(small_disk / "store").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with ParameterStore.open(small_disk / "store", CONFIG, access=READ) as opened:
        with opened.fetch(opened.keys) as held:
            assert float(sum(held[key].view("weight").sum() for key in held)) == pytest.approx(total())
        with ParameterStore.open(small_disk / "store", CONFIG, access=READ) as second:
            assert second.keys == opened.keys


def test_its_least_budget_is_that_of_weights_alone(store: Path) -> None:
    """Records of 3,000 fp32 parameters: weights take 12,288 bytes with padding, and are one frame."""
    schemas = read_schemas(store)
    least = minimum_host_budget(schemas, access=READ)
    assert least == 12_288
    with ParameterStore.open(store, StoreConfig(host_budget=least), access=READ) as opened:
        for key, weight in weights(4, 3000).items():
            with opened.fetch([key]) as held:
                assert held[key].view("weight").tolist() == weight.tolist()
        stats = opened.core.cache.residency.stats()
        assert (stats.misses, stats.read_bytes, stats.written_bytes) == (4, 4 * 12_288, 0)
    with pytest.raises(BudgetError, match=rf"cannot hold one record; the minimum is {least} bytes"):
        ParameterStore.open(store, StoreConfig(host_budget=least - 1), access=READ)


def test_what_a_verification_will_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three records of 12 KB, read at once; or, where less may be in flight, so much and the largest slot: two moments of
    4 KB.
    """
    with ParameterStore.create(tmp_path / "s", [RecordSchema("expert", 1024)], CONFIG) as store:
        for key, weight in weights(3, 1024).items():
            store.register(key, "expert", weight=weight)
        store.commit()
    told: list[MemoryAccount] = []
    report = verify_all(tmp_path / "s", announced=told.append)
    assert told == [report.account]
    assert report.account.parts["reads ahead"] == 3 * 12 * 1024 == report.bytes_read
    assert report.account.parts["host cache"] == minimum_reading_budget(read_schemas(tmp_path / "s"))
    monkeypatch.setattr(extents, "_IN_FLIGHT_BYTES", 4096)
    assert verify_all(tmp_path / "s").account.parts["reads ahead"] == 4096 + 2 * 4096
