"""A store that is opened to read: by several at once, beside no writer, and without a byte of it written."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store, weights

from tierstore.errors import BudgetError, ConfigError, StoreError, StoreFormatError, StoreInUseError
from tierstore.store import Group, ParameterStore, StoreConfig, StripeConfig
from tierstore.store.config import StoreAccess
from tierstore.store.disk import lease
from tierstore.store.gc import Mode, collect
from tierstore.store.opening import OpenAt, minimum_host_budget, read_schemas
from tierstore.store.summary import read_summary

READ = StoreAccess.READ
CONFIG = StoreConfig(host_budget=1 << 20)

_READER = """
import sys
from pathlib import Path
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.config import StoreAccess
with ParameterStore.open(Path(sys.argv[1]), StoreConfig(host_budget=1 << 20), access=StoreAccess.READ) as store:
    with store.fetch(list(store.core.records.cached)) as lease:
        print("open", float(sum(lease[key].view("weight").sum() for key in lease)), flush=True)
    sys.stdin.read()
"""


def fingerprint(store: Path) -> dict[str, object]:
    """Of every file and directory: what it is, when it was changed, and what is in it."""
    found: dict[str, object] = {}
    for path in [store, *sorted(store.rglob("*"))]:
        status = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        where = (status.st_ino, status.st_mode, status.st_size, status.st_blocks)
        found[str(path.relative_to(store))] = (*where, status.st_mtime_ns, status.st_ctime_ns, content)
    return found


@contextmanager
def reader(store: Path) -> Iterator[tuple[int, str]]:
    """A process that has read all of ``store`` and keeps it open: its pid, and the sum of all weights."""
    process = subprocess.Popen(
        [sys.executable, "-c", _READER, str(store)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        said = process.stdout.readline().split()
        assert said[:1] == ["open"]
        yield process.pid, said[1]
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


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
    with pytest.raises(StoreError, match="opened at its last commit, as it is"):
        ParameterStore.open(store, CONFIG, access=READ, at=OpenAt.PREVIOUS)
    (store / "lease").unlink()
    with pytest.raises(StoreFormatError, match="the lease is missing"):
        ParameterStore.open(store, CONFIG, access=READ)
    assert not (store / "lease").exists()


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
