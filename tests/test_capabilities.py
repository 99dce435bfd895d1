"""tierstore.capabilities: settings resolve as promised; probes answer on made-up machines and on this one."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tierstore.capabilities import (
    Capability,
    Finding,
    filesystem_type,
    instruction_sets,
    probe_avx2,
    probe_avx512,
    probe_dax,
    probe_direct_io,
    probe_huge_pages,
    probe_io_uring,
    probe_locks,
    resolve,
)
from tierstore.errors import CapabilityError
from tierstore.store.disk.lease import DirectoryLease


def here() -> Finding:
    return Finding(True, "it works")


def lacking() -> Finding:
    return Finding(False, "no such thing")


def never() -> Finding:
    raise AssertionError("OFF must not probe")


@pytest.mark.parametrize(
    ("setting", "probe", "effective", "reason"),
    [
        (Capability.OFF, never, Capability.OFF, "switched off"),
        (Capability.AUTO, here, Capability.ON, "it works"),
        (Capability.AUTO, lacking, Capability.OFF, "no such thing"),
        (Capability.ON, here, Capability.ON, "it works"),
    ],
)
def test_resolve(setting, probe, effective, reason) -> None:
    resolution = resolve("thing", setting, probe)
    assert (resolution.effective, resolution.reason) == (effective, reason)
    assert bool(resolution) is (effective is Capability.ON)


def test_on_fails_where_it_is_lacking() -> None:
    with pytest.raises(CapabilityError, match=r"^thing is set to on.*no such thing$"):
        resolve("thing", Capability.ON, lacking)


def test_io_uring_leaves_no_descriptor_behind() -> None:
    before = os.listdir("/proc/self/fd")
    found = probe_io_uring()
    assert found.reason
    assert os.listdir("/proc/self/fd") == before


def test_direct_io_leaves_no_file_behind(tmp_path: Path) -> None:
    assert probe_direct_io(tmp_path).reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_direct_io_where_no_file_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(**options: object) -> tuple[int, str]:
        raise OSError(code, os.strerror(code), str(tmp_path))

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    found = probe_direct_io(tmp_path)
    assert not found.available
    assert found.reason.startswith(f"{errno.errorcode[code]} from ")
    assert found.reason.endswith("no file can be made to try it")


def test_direct_io_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, content: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    assert "the disk is full" in probe_direct_io(tmp_path).reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ((), ""),
        ((stat.S_ISDIR,), "do not remove `lease` while a store is open there"),
        ((stat.S_ISDIR, stat.S_ISREG), "no store can be opened there"),
        ((stat.S_ISREG,), "no store can be opened there"),
    ],
)
def test_locks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: tuple[Callable[[int], bool], ...],
    reason: str,
) -> None:
    flock = fcntl.flock

    def lock(fd: int, kind: int) -> None:
        if any(of(os.fstat(fd).st_mode) for of in refused):
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    found = probe_locks(tmp_path)
    assert found.available is not bool(refused)
    assert found.reason.endswith(reason)
    assert found.reason.startswith("ENOLCK from ") is bool(refused)
    assert list(tmp_path.iterdir()) == []


def test_locks_beside_an_open_store(tmp_path: Path) -> None:
    with DirectoryLease(tmp_path):
        assert probe_locks(tmp_path).available
    with pytest.raises(FileNotFoundError):
        probe_locks(tmp_path / "nowhere")


def test_direct_io_where_no_file_can_be(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe_direct_io(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "available"),
    [("always [madvise] never", True), ("[always] madvise never", True), ("always madvise [never]", False)],
)
def test_huge_pages(tmp_path: Path, text: str, available: bool) -> None:
    directory = tmp_path / "kernel/mm/transparent_hugepage"
    directory.mkdir(parents=True)
    (directory / "enabled").write_text(f"{text}\n")
    assert probe_huge_pages(tmp_path).available is available


def test_a_kernel_without_huge_pages(tmp_path: Path) -> None:
    assert not probe_huge_pages(tmp_path).available


@pytest.mark.parametrize(
    ("flags", "sets"),
    [
        ("fpu sse4_2 avx2 fma avx512f avx512bw avx512dq avx512vl", ["avx512", "avx2", "scalar"]),
        ("fpu avx2 avx512f", ["avx2", "scalar"]),
        ("fpu sse4_2", ["scalar"]),
    ],
)
def test_instruction_sets(tmp_path: Path, flags: str, sets: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\nflags\t\t: \n")
    assert instruction_sets(tmp_path) == sets
    assert probe_avx2(tmp_path).available is ("avx2" in sets)
    assert probe_avx512(tmp_path).available is ("avx512" in sets)


def test_mounts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "23 22 259:0 / /pmem rw,relatime - xfs /dev/pmem0 rw,attr2,dax=always\n"
        "24 22 8:2 / /pm rw - tmpfs tmpfs rw\n"
        "25 22 8:3 / /with\\040space rw - btrfs /dev/sdb rw\n"
        "a line that is cut\n"
    )
    assert filesystem_type(Path("/pmem/store"), tmp_path) == "xfs"
    assert filesystem_type(Path("/pmemory"), tmp_path) == "ext4"
    assert filesystem_type(Path("/with space/x"), tmp_path) == "btrfs"
    assert probe_dax(Path("/pmem/store"), tmp_path).available
    assert probe_dax(Path("/home"), tmp_path) == Finding(False, "/ (ext4) is not mounted with dax")
    assert filesystem_type(Path("/home"), tmp_path / "none") == "unknown"
