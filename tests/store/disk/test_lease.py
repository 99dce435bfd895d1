"""What keeps a second process out when files of an open store are removed, and what a removed file is noticed by."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from child_process import child
from conftest_store import small_store, weights

from tierstore.errors import StoreFormatError, StoreInUseError
from tierstore.store import IoBackendName, IoConfig, ParameterStore, RecordSchema, StoreConfig, StripeConfig
from tierstore.store.committing import Keep
from tierstore.store.config import StoreAccess
from tierstore.store.disk.home import building
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.gc import Mode, collect
from tierstore.train.tokens.making import _locked

NUMEL = 3000
CONFIG = StoreConfig(host_budget=1 << 20)


def step(store: ParameterStore) -> None:
    store.update({"e0": np.ones(NUMEL, np.float32)}, lr=0.1)


# Two processes ----------------------------------------------------------------------------------------------

WRITER = """
import sys
import numpy as np
from tierstore.store import *
config = StoreConfig(host_budget=1 << 20)
with ParameterStore.open(sys.argv[1], config) as store:
    print("open", flush=True)
    for line in sys.stdin:
        store.update({"e0": np.ones(3000, np.float32)}, lr=0.1)
        try:
            print("acknowledged", store.commit(), flush=True)
        except Exception as error:
            print(type(error).__name__, error, flush=True)
"""


@pytest.mark.parametrize("access", list(StoreAccess))
def test_a_lease_that_is_removed_lets_nobody_in(tmp_path: Path, access: StoreAccess) -> None:
    """The first process has acknowledged generations 1 to 2, and no other acknowledges anything."""
    store = tmp_path / "store"
    small_store(store).close()
    with child(WRITER, store) as first:
        assert first.answer() == "open"
        assert first.ask() == "acknowledged 2"
        (store / "lease").unlink()
        with pytest.raises(StoreInUseError, match=rf"open in another process \(pid {first.pid}\)"):
            ParameterStore.open(store, CONFIG, access=access)
        if access is StoreAccess.WRITE:
            with pytest.raises(StoreInUseError, match=f"pid {first.pid}"):
                collect(store, Mode.REMOVE)
        assert not (store / "lease").exists()
        assert f"'{store}/lease'" in first.ask()
    with ParameterStore.open(store, CONFIG) as opened:
        assert opened.last_commit.generation == 2
        assert opened.verify().failures == []


def test_a_reader_whose_lease_is_removed_keeps_writers_out(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    with ParameterStore.open(tmp_path / "store", CONFIG, access=StoreAccess.READ):
        (tmp_path / "store" / "lease").unlink()
        with pytest.raises(StoreInUseError, match=rf"open to read in another process \(pid {os.getpid()}\)"):
            ParameterStore.open(tmp_path / "store", CONFIG)
        with ParameterStore.open(tmp_path / "store", CONFIG, access=StoreAccess.READ) as second:
            assert second.verify().failures == []
    ParameterStore.open(tmp_path / "store", CONFIG).close()
    assert (tmp_path / "store" / "lease").exists()


BUSY = """
import sys
import numpy as np
from tierstore.store import *
with ParameterStore.open(sys.argv[1], StoreConfig(host_budget=64 << 20)) as store:
    store.reserve()
    print("open", flush=True)
    for number in range(1000):
        store.update({key: np.full(1 << 16, number, np.float32) for key in store.keys}, lr=0.1)
        store.core.committer.begin()  # the writes are in flight
        if number == 1:
            print("writing", flush=True)
"""


def test_writes_in_flight_when_it_is_killed_end_before_another_opens(tmp_path: Path) -> None:
    """Also with the lease file gone: nothing moves in the extents once another process has the store."""
    store = tmp_path / "store"
    small_store(store, count=8, numel=1 << 16, budget=64 << 20).close()
    with child(BUSY, store) as process:
        assert [process.answer(), process.answer()] == ["open", "writing"]
        (store / "lease").unlink()
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with ParameterStore.open(store, StoreConfig(host_budget=16 << 20)) as opened:
            before = {path.name: path.read_bytes() for path in (store / "extents").iterdir()}
            process.wait()
            for key, weight in weights(8, 1 << 16).items():
                with opened.fetch([key]) as held:
                    assert (held[key].view("weight") == weight).all()
            assert opened.verify().failures == []
            assert {path.name: path.read_bytes() for path in (store / "extents").iterdir()} == before


@pytest.mark.parametrize("stripe", [False, True])
def test_the_ring_keeps_every_lock_of_a_writer(tmp_path: Path, stripe: bool) -> None:
    """Closing the descriptors, as the end of a process does, unlocks nothing before the engine has stopped."""
    config = StripeConfig(directories=(tmp_path / "b",) if stripe else ())
    small_store(tmp_path / "a", stripe=config).close()
    io = IoConfig(backend=IoBackendName.URING)
    try:
        store = ParameterStore.open(tmp_path / "a", StoreConfig(host_budget=1 << 20, io=io))
    except OSError as error:
        pytest.skip(f"no uring here: {error}")
    locked = [
        tmp_path / "a",
        tmp_path / "a/lease",
        *([tmp_path / "b", tmp_path / "b/lease"] if stripe else []),
    ]
    inodes = {(path.stat().st_dev, path.stat().st_ino) for path in locked}
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # that of the listing is gone
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) in inodes:
                os.close(fd)
    others = [os.open(path, os.O_RDONLY) for path in locked]
    for other in others:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
    store.core.engine.close()
    for other in others:
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.close(other)
    store.close()


# Locks that a file system has not ---------------------------------------------------------------------------


def refuse_locks(monkeypatch: pytest.MonkeyPatch, code: int, refused: Callable[[int], bool]) -> None:
    """``flock`` fails with ``code`` for what has a mode that is ``refused``."""
    flock = fcntl.flock

    def lock(fd: int, kind: int) -> None:
        if refused(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock)


LOCKS_NO_DIRECTORY = """
import errno, fcntl, os, stat
flock = fcntl.flock
def lock(fd, kind):
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    flock(fd, kind)
fcntl.flock = lock
"""


def test_where_directories_cannot_be_locked_the_lease_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_locks(monkeypatch, errno.EOPNOTSUPP, stat.S_ISDIR)
    path = tmp_path / "store"
    with small_store(path) as first:
        (said,) = [line for line in first.status().effective if line.startswith("locks")]
        assert said == f"locks: `lease` alone counts in {path} (Operation not supported)"
        with pytest.raises(StoreInUseError, match=f"pid {os.getpid()}"):
            ParameterStore.open(path, CONFIG)
        (path / "lease").unlink()
        with pytest.raises(StoreFormatError, match="lease is missing, and the file system cannot lock"):
            ParameterStore.open(path, CONFIG, access=StoreAccess.READ)
        with child(LOCKS_NO_DIRECTORY + WRITER, path) as second:
            assert second.answer() == "open"
            step(first)
            with pytest.raises(OSError, match="was replaced while the store was open") as raised:
                first.commit()
            assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, str(path / "lease"))
            assert second.ask() == "acknowledged 2"
    with ParameterStore.open(path, CONFIG) as opened:
        assert opened.last_commit.generation == 2
        assert opened.verify().failures == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Every lock that there is: of stores, to write and to read, of what is being built, and of tokens."""
    small_store(tmp_path / "s").close()
    refuse_locks(monkeypatch, code, lambda mode: True)
    attempts: list[tuple[Callable[[], object], Path]] = [
        (lambda: DirectoryLease(tmp_path / "s"), tmp_path / "s/lease"),
        (lambda: DirectoryLease(tmp_path / "s", access=StoreAccess.READ), tmp_path / "s/lease"),
        (lambda: ParameterStore.open(tmp_path / "s", CONFIG), tmp_path / "s/lease"),
        (lambda: small_store(tmp_path / "new"), tmp_path / "new/lease"),
        (lambda: building(tmp_path).__enter__(), tmp_path),
        (lambda: _locked(tmp_path / "tokens").__enter__(), tmp_path / "tokens/lock"),
    ]
    before = os.listdir("/proc/self/fd")
    for attempt, path in attempts:
        with pytest.raises(OSError, match="the file system needs locks") as raised:
            attempt()
        assert (raised.value.errno, raised.value.filename) == (code, str(path))
        assert str(raised.value.strerror).startswith(os.strerror(code))
    assert os.listdir("/proc/self/fd") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


# A full disk ------------------------------------------------------------------------------------------------


def test_a_full_disk_takes_no_pid_and_the_holder_is_named_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    small_store(tmp_path / "s").close()
    monkeypatch.setattr(os, "pwrite", full)
    with DirectoryLease(tmp_path / "s"):
        assert (tmp_path / "s/lease").read_text() == ""
        with pytest.raises(StoreInUseError, match=rf"open in another process \(pid {os.getpid()}\)"):
            DirectoryLease(tmp_path / "s", patience_s=0.0)


def test_a_full_disk_takes_no_lease_and_its_directory_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gc`` can free space; a commit does not count on a lock that is not there."""
    small_store(tmp_path / "s").close()
    (tmp_path / "s/lease").unlink()
    opened = os.open

    def full(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", full)
    assert collect(tmp_path / "s", Mode.REMOVE).nbytes > 0
    with DirectoryLease(tmp_path / "s"), pytest.raises(StoreInUseError, match=f"pid {os.getpid()}"):
        DirectoryLease(tmp_path / "s", patience_s=0.0)
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        step(store)
        with pytest.raises(OSError, match="No space left") as raised:
            store.commit()
        assert raised.value.filename == str(tmp_path / "s/lease")
    monkeypatch.undo()
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        assert (store.last_commit.generation, store.verify().failures) == (1, [])


# Files that go ----------------------------------------------------------------------------------------------


def striped(path: Path) -> ParameterStore:
    store = small_store(path / "a", stripe=StripeConfig(directories=(path / "b",)))
    step(store)
    return store


def files_of(path: Path) -> list[Path]:
    return sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())


def opened_below(path: Path) -> set[Path]:
    """What this process has open below ``path``, by what the kernel says; without what has no name."""
    descriptors = [Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")]
    links = {os.readlink(descriptor) for descriptor in descriptors if os.path.lexists(descriptor)}
    below = {Path(link) for link in links if link.startswith(f"{path}/") and "(deleted)" not in link}
    return {link.relative_to(path) for link in below if link.is_file()}


@pytest.mark.parametrize("replaced", [False, True])
def test_no_commit_is_acknowledged_once_a_file_of_the_store_has_gone(fast_path: Path, replaced: bool) -> None:
    """Each file that a store in two directories has, whatever it is called."""
    with striped(fast_path) as store:
        found = files_of(fast_path)
        assert opened_below(fast_path) <= set(found)
    assert len(found) == 9  # an index, and of both an identity, a lease and two extents
    for number, name in enumerate(found):
        path = fast_path / str(number)
        path.mkdir()
        store = striped(path)
        assert store.commit() == 2
        shutil.copytree(path, fast_path / "copy")
        content = (path / name).read_bytes()
        (path / name).unlink()
        if replaced:
            (path / name).write_bytes(content)
        step(store)
        what = "replaced" if replaced else "removed"
        with pytest.raises(OSError, match=f"the file was {what} while the store was open") as raised:
            store.commit()
        assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, str(path / name))
        assert store.last_commit.generation == 2
        store.close()
        # What was acknowledged is in the files that there were.
        shutil.rmtree(path)
        (fast_path / "copy").rename(path)
        config = StoreConfig(host_budget=1 << 20, stripe=StripeConfig(directories=(path / "b",)))
        with ParameterStore.open(path / "a", config) as opened:
            assert (opened.last_commit.generation, opened.verify().failures) == (2, [])
        shutil.rmtree(path)


def test_nor_is_a_prepared_commit(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        step(store)
        store.core.committer.commit(keep=Keep.PREVIOUS)
        (tmp_path / "s/index/data.mdb").rename(tmp_path / "elsewhere")
        with pytest.raises(OSError, match="the file was removed") as raised:
            store.core.committer.acknowledge()
        assert raised.value.filename == str(tmp_path / "s/index/data.mdb")


def test_a_directory_of_extents_that_is_moved_away_is_noticed(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        (tmp_path / "s/extents").rename(tmp_path / "s/moved")
        step(store)
        with pytest.raises(OSError, match="the file was removed"):
            store.commit()


def test_a_store_goes_on_in_directories_that_are_renamed(tmp_path: Path) -> None:
    """It grows, spills and commits there, and touches nothing that has taken the old names."""
    with striped(tmp_path) as store:
        store.commit()
        for name, new in (("a", "c"), ("b", "d")):
            (tmp_path / name).rename(tmp_path / new)
            (tmp_path / name).mkdir()
            (tmp_path / name / "mine").write_text("not the store's")
        step(store)
        store.register("new", "expert")
        store.core.reserve_scratch("expert")
        store.reserve({"expert": 200})
        assert store.commit({"big": bytes(1 << 21)}) == 3
        assert {drive.path for drive in store.status().drives} == {tmp_path / "c", tmp_path / "d"}
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b") == [Path("mine")]
    with ParameterStore.open(tmp_path / "c", CONFIG) as opened:  # the index knows where the other one is
        assert (opened.last_commit.generation, opened.verify().failures) == (3, [])
        assert opened.keys == ["e0", "e1", "e2", "e3", "new"]


@pytest.mark.parametrize("commits", [True, False])
def test_so_does_one_without_a_commit(tmp_path: Path, commits: bool) -> None:
    store = ParameterStore.create(tmp_path / "a", [RecordSchema("expert", NUMEL)], CONFIG)
    (tmp_path / "a").rename(tmp_path / "c")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/mine").write_text("not the store's")
    if commits:
        store.commit()
    store.close()
    assert (tmp_path / "a/mine").read_text() == "not the store's"
    assert (tmp_path / "c/tierstore.json").exists() is commits


def test_a_relative_name_is_that_of_the_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_store(tmp_path / "s").close()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with ParameterStore.open("s", CONFIG) as store:
        monkeypatch.chdir(tmp_path / "other")
        store.reserve({"expert": 100})
        step(store)
        assert store.commit() == 2
    assert list((tmp_path / "other").iterdir()) == []


def test_an_empty_scratch_directory_may_be_cleaned_away(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        (tmp_path / "s/scratch").rmdir()
        store.core.reserve_scratch("expert")
        step(store)
        assert store.commit() == 2


@pytest.mark.parametrize("lost", ["store", "stripe"])
def test_a_lost_creation_leaves_the_directory_to_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """The winner has locked the directory that the loser made, and has made nothing in it yet."""
    locked: list[int] = []

    class Second(DirectoryLease):
        def __init__(self, directory: Path) -> None:
            if directory == tmp_path / lost:
                locked.append(os.open(directory, os.O_RDONLY))
                fcntl.flock(locked[0], fcntl.LOCK_EX)
            super().__init__(directory, patience_s=0.1)

    monkeypatch.setattr("tierstore.store.opening.DirectoryLease", Second)
    monkeypatch.setattr("tierstore.store.disk.drives.DirectoryLease", Second)
    config = StoreConfig(host_budget=1 << 20, stripe=StripeConfig(directories=(tmp_path / "stripe",)))
    with pytest.raises(StoreInUseError):
        ParameterStore.create(tmp_path / "store", [RecordSchema("r", NUMEL)], config)
    os.close(locked[0])
    assert [path.name for path in tmp_path.iterdir()] == [lost]
