"""tierstore.capabilities: settings resolve as promised; probes answer on made-up machines and on this one."""

from __future__ import annotations

import os
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
    resolve,
)
from tierstore.errors import CapabilityError


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
