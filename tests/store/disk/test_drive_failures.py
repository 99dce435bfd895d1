"""One of two drives fills up, fails, or comes back read-only: the other helps where it can, and what cannot go on stops,
naming the drive.

The file systems are real: ext4 on a loop device, shut down by EXT4_IOC_SHUTDOWN, after which every transfer and sync
fails with EIO. Mounting them needs root. Without it the errors of a second drive go untested; that a failed write or
sync poisons a store is tested everywhere.
"""

import errno
import fcntl
import os
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store, step_all

from tierstore._native import File
from tierstore.errors import StorePoisonedError
from tierstore.store import (
    Group,
    IoBackendName,
    IoConfig,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    StripeConfig,
)
from tierstore.store.disk.home import remove_unfinished
from tierstore.store.disk.lease import DirectoryLease

NUMEL = 3000
CONFIG = StoreConfig(host_budget=1 << 20)
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_LOG = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH


def shut_down(mount: Path) -> None:
    fd = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(fd)


def remount(mount: Path, *options: str) -> None:
    """Unmounts, and mounts again from the same image."""
    image = mount.parent / "disk"
    subprocess.run(["umount", mount], check=True)
    subprocess.run(["mount", "-o", ",".join(("loop", *options)), image, mount], check=True)


def fill(mount: Path, *, but_blocks: int) -> Path:
    space = os.statvfs(mount)
    with open(mount / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (space.f_bavail - but_blocks) * space.f_frsize)
    return mount / "filler"


def test_a_full_drive_leaves_the_rest_to_the_other(tmp_path: Path, small_disk: Path) -> None:
    stripe = StripeConfig(directories=(small_disk / "b",))
    with small_store(tmp_path / "store", stripe=stripe) as store:
        filler = fill(small_disk, but_blocks=40)
        before = store.status().drives
        # 40 records want 2 x 20 x 48 KiB there, and there are 160 KiB.
        for number in range(40):
            store.register(f"new{number}", "expert", weight=np.ones(NUMEL, np.float32))
        for _ in range(3):
            step_all(store, 0.1)
            store.commit()
        own, small = store.status().drives
        assert small.reserved_bytes - before[1].reserved_bytes <= 40 * 4096
        slot_bytes = sum(store.info("e0").schema.layout(g).slot_bytes for g in (Group.WEIGHTS, Group.MOMENTS))
        assert own.reserved_bytes + small.reserved_bytes >= 2 * 44 * slot_bytes
        crc = store.records_crc32c()
        filler.unlink()
        step_all(store, 0.1)
        store.commit()
        assert store.status().drives[1].reserved_bytes > small.reserved_bytes  # there is room again
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.verify().failures == []
        assert store.records_crc32c() != crc


class _Quota:
    """A file of an owner who may have ``slots`` slots in it, on a drive with any amount of room."""

    def __init__(self, file: File, slots: int, slot_bytes: int) -> None:
        self._file = file
        self._most = slots * slot_bytes

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def allocate(self, offset: int, nbytes: int) -> None:
        if offset + nbytes > self._most:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), self._file.path)
        self._file.allocate(offset, nbytes)


def test_a_quota_is_used_up_and_the_rest_left_to_the_other(tmp_path: Path) -> None:
    """Room for 13 slots where 20 are asked for: all 13 are had, though the file system says that there is more."""
    stripe = StripeConfig(directories=(tmp_path / "b",))
    schema = RecordSchema("expert", NUMEL)
    with ParameterStore.create(
        tmp_path / "store", [schema], StoreConfig(host_budget=1 << 20, stripe=stripe)
    ) as store:
        extent = store.core.extents.of(0, Group.WEIGHTS).extents[1]
        file, slot_bytes = extent.file, extent.layout.slot_bytes
        extent.file = _Quota(file, 13, slot_bytes)  # type: ignore[assignment]
        store.reserve({"expert": 20})
        own, other = store.core.extents.of(0, Group.WEIGHTS).extents
        assert (own.reserved_slots, other.reserved_slots) == (27, 13)
        with pytest.raises(OSError, match=r"Disk quota exceeded: \d+ more bytes are needed") as caught:
            extent.reserve(14)
        assert caught.value.errno == errno.EDQUOT
        extent.file = file


def test_when_all_drives_are_full_it_is_said_before_anything_moves(small_disk: Path) -> None:
    stripe = StripeConfig(directories=(small_disk / "b",))
    with small_store(small_disk / "store", stripe=stripe) as store:
        fill(small_disk, but_blocks=40)
        with pytest.raises(OSError, match=rf"needed on any drive; free: \d+ in {small_disk}/store, \d+ in"):
            store.reserve({"expert": 100})
        step_all(store, 0.1)
        assert store.commit() == 2


@pytest.mark.parametrize("backend", [IoBackendName.THREADS, IoBackendName.AUTO])
def test_a_drive_that_dies_stops_the_store_and_is_named(
    tmp_path: Path, small_disk: Path, backend: IoBackendName
) -> None:
    stripe = StripeConfig(directories=(small_disk / "b",))
    small_store(tmp_path / "store", stripe=stripe).close()
    config = StoreConfig(host_budget=1 << 20, io=IoConfig(backend=backend))
    with ParameterStore.open(tmp_path / "store", config) as store:
        step_all(store, 0.1)
        store.commit()
        crc = store.records_crc32c()
        step_all(store, 0.1)
        shut_down(small_disk)
        with pytest.raises(OSError, match=re.escape(str(small_disk / "b" / "extents" / "expert."))) as caught:
            store.commit()
        assert caught.value.errno == errno.EIO
        assert re.search("write|sync", str(caught.value))
        with pytest.raises(StorePoisonedError, match=f"{small_disk}/b/extents.* reopen the store"):
            store.fetch(["e0"])
    with pytest.raises(OSError, match=r"Input/output error|Read-only") as caught:
        ParameterStore.open(tmp_path / "store", CONFIG)
    assert str(caught.value.filename).startswith(str(small_disk / "b"))
    remount(small_disk)
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (store.last_commit.generation, store.records_crc32c()) == (2, crc)
        assert store.verify().failures == []
        step_all(store, 0.1)
        assert store.commit() == 3


def test_a_read_from_a_dead_drive_is_named(tmp_path: Path, small_disk: Path) -> None:
    small_store(tmp_path / "store", stripe=StripeConfig(directories=(small_disk / "b",))).close()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        shut_down(small_disk)
        with pytest.raises(OSError, match=f"read.*{small_disk}/b/extents/expert.weights") as caught:
            store.fetch(["e1"])
        assert caught.value.errno == errno.EIO
        with store.fetch(["e0"]) as lease:  # the other drive has it
            assert lease["e0"].copy("weight").any()


def test_a_drive_that_cannot_be_taken_back_holds_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two added directories cannot be emptied: the second is let go of, and taken back."""
    small_store(tmp_path / "store").close()

    def fail(path: Path) -> None:
        if path.name == "b":
            raise OSError(errno.EIO, "Input/output error", str(path))
        remove_unfinished(path)

    added = StoreConfig(
        host_budget=1 << 20, stripe=StripeConfig(directories=(tmp_path / "b", tmp_path / "c"))
    )
    store = ParameterStore.open(tmp_path / "store", added)
    monkeypatch.setattr("tierstore.store.disk.drives.remove_unfinished", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.close()
    assert not (tmp_path / "c").exists()
    with DirectoryLease(tmp_path / "b"), DirectoryLease(tmp_path / "store"):
        pass


def test_a_drive_that_comes_back_read_only_is_refused(tmp_path: Path, small_disk: Path) -> None:
    small_store(tmp_path / "store", stripe=StripeConfig(directories=(small_disk / "b",))).close()
    remount(small_disk, "ro")
    with pytest.raises(OSError, match=f"Read-only file system: .*{small_disk}/b") as caught:
        ParameterStore.open(tmp_path / "store", CONFIG)
    assert caught.value.errno == errno.EROFS
    remount(small_disk)
    ParameterStore.open(tmp_path / "store", CONFIG).close()
