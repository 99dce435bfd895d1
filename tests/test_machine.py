"""tierstore.machine: cgroup limits of both versions on made-up trees, plausible facts of this machine, and the
account of a process's memory, by hand."""

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from child_process import run_python
from refusals import refuses

from tierstore import machine
from tierstore.errors import BudgetError
from tierstore.machine import (
    NO_THREAD_CACHE,
    Memory,
    MemoryAccount,
    allowed_bytes,
    cgroup_limit_bytes,
    peak_resident_bytes,
    resident_bytes,
)


def limit_of(tmp_path: Path, cgroup: str, files: dict[str, str]) -> int | None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return cgroup_limit_bytes(tmp_path / "proc", tmp_path / "cgroup")


NONE_V1 = str(2**63 - 4096)


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000000"}, 1000000),
        ("0::/a/b\n", {"a/b/memory.max": "500", "a/memory.max": "1000"}, 500),
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/gone\n", {"memory.max": "700"}, 700),  # a container that shows its own group as the root
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9000"}, 9000),
        (
            "4:memory:/x\n",
            {"memory/x/memory.limit_in_bytes": NONE_V1, "memory/memory.limit_in_bytes": NONE_V1},
            None,
        ),
        (
            "5:cpu:/y\n4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": "9000", "unified/memory.max": "max"},
            9000,
        ),
        ("", {}, None),
    ],
)
def test_cgroup_limits(tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None) -> None:
    assert limit_of(tmp_path, cgroup, files) == limit


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroup_limit_bytes(tmp_path, tmp_path) is None


def test_usable_memory() -> None:
    assert Memory(total_bytes=10, available_bytes=5, limit_bytes=None).usable_bytes == 10
    assert Memory(total_bytes=10, available_bytes=5, limit_bytes=4).usable_bytes == 4


def test_this_machine(tmp_path: Path) -> None:
    memory = machine.memory()
    assert 0 < memory.usable_bytes <= memory.total_bytes
    space = machine.disk(tmp_path)
    assert 0 <= space.free_bytes <= space.total_bytes
    assert space.filesystem
    assert machine.cores() >= 1
    with pytest.raises(FileNotFoundError) as caught:
        machine.disk(tmp_path / "nowhere")
    assert caught.value.filename == str(tmp_path / "nowhere")


def test_the_processor_by_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Processor 9\nmodel name\t: another\n")
    assert machine.processor(tmp_path) == "A Processor 9"
    assert machine.processor(tmp_path / "nowhere") == platform.machine()


def test_the_device_under_a_directory(tmp_path: Path) -> None:
    number = os.stat(tmp_path).st_dev
    sys = tmp_path / "sys"
    disk = sys / "devices/nvme0n1"
    part = disk / "nvme0n1p2"
    part.mkdir(parents=True)
    assert machine.block_device(tmp_path, sys) == "unknown"
    links = sys / "dev/block"
    links.mkdir(parents=True)
    (links / f"{os.major(number)}:{os.minor(number)}").symlink_to(part)
    assert machine.block_device(tmp_path, sys) == "nvme0n1p2"
    (disk / "device").mkdir()
    (disk / "device/model").write_text("Some SSD 990   \n")
    assert machine.block_device(tmp_path, sys) == "nvme0n1p2 (Some SSD 990)"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        machine.block_device(tmp_path / "nowhere")


# The memory of this process ---------------------------------------------------------------------------------

MIB = 1 << 20
ACCOUNT = MemoryAccount({"experts": 256 * MIB, "text": 0, "process": 512 * MIB})


def test_an_account_by_hand() -> None:
    assert ACCOUNT.nbytes == 768 * MIB
    assert ACCOUNT.describe() == "memory: 768 MiB: process 512 MiB, experts 256 MiB"
    assert ACCOUNT.compare(384 * MIB) == "memory: 768 MiB announced, 384 MiB at the peak (50%)"
    assert ACCOUNT.as_json() == {
        "announced_bytes": 768 * MIB,
        "parts": [
            {"part": "experts", "held_bytes": 256 * MIB},
            {"part": "text", "held_bytes": 0},
            {"part": "process", "held_bytes": 512 * MIB},
        ],
    }


def test_an_account_that_does_not_fit_names_what_would() -> None:
    ACCOUNT.check(768 * MIB, "the batch")
    with refuses(BudgetError, "memory:", str(768 * MIB), "the batch", "process 512 MiB"):
        ACCOUNT.check(768 * MIB - 1, "the batch")


@pytest.mark.parametrize(("limit", "expected"), [(None, 0.8 * 6000), (4000, 0.8 * 4000), (8000, 0.8 * 6000)])
def test_what_a_process_may_take(limit: int | None, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is told; or else 80% of what is available, or of a container's limit if that is less."""
    found = Memory(total_bytes=10_000, available_bytes=6000, limit_bytes=limit)
    monkeypatch.setattr(machine, "memory", lambda: found)
    assert allowed_bytes(7) == 7
    assert allowed_bytes(0) == int(expected)


def test_memory_is_measured() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * (64 * MIB))
    assert resident_bytes() >= before + 60 * MIB
    assert peak_resident_bytes() >= len(held)
    child = run_python("from tierstore.machine import peak_resident_bytes; print(peak_resident_bytes())")
    assert int(child.stdout) < len(held), "what its parent held is not its own"


@pytest.mark.parametrize(("tunables", "gaps"), [(NO_THREAD_CACHE, 120), ("glibc.malloc.tcache_count=7", 240)])
def test_gaps_are_those_of_the_allocator_that_the_process_began_with(tunables: str, gaps: int) -> None:
    code = (
        "import os; from tierstore.machine import working_bytes; os.environ['GLIBC_TUNABLES'] = 'later';"
        "print(working_bytes(400) - working_bytes(0))"
    )
    # With another PYTHONHASHSEED it is a new process, and no fork of the tests' own.
    child = run_python(code, GLIBC_TUNABLES=tunables, PYTHONHASHSEED="1")
    assert int(child.stdout) == gaps


def test_the_space_that_directories_hold_may_be_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two directories of one file system: what is free there counts once."""
    found = replace(machine.disk(tmp_path), free_bytes=4096)
    monkeypatch.setattr(machine, "disk", lambda _: found)
    held, absent = tmp_path / "held", tmp_path / "absent"
    with pytest.raises(OSError, match="rows need 8 KiB, and 4 KiB are free"):
        machine.require_space([held, absent], 8192, "rows")
    held.mkdir()
    (held / "file").write_bytes(bytes(4096))
    machine.require_space([held, absent], 8192, "rows")
