"""tierstore.capabilities: settings resolve as promised; probes answer on made-up machines and on this one."""

import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from denied_calls import NUMBERS, run_without

from tierstore.capabilities import (
    Capability,
    Finding,
    filesystem_type,
    instruction_sets,
    probe_dax,
    probe_direct_io,
    probe_fallocate,
    probe_huge_pages,
    probe_instructions,
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
        (Capability.OFF, never, False, "switched off"),
        (Capability.AUTO, here, True, "it works"),
        (Capability.AUTO, lacking, False, "no such thing"),
        (Capability.ON, here, True, "it works"),
    ],
)
def test_resolve(setting, probe, effective, reason) -> None:
    found = resolve("thing", setting, probe)
    assert (bool(found), found.reason) == (effective, reason)


def test_on_fails_where_it_is_lacking() -> None:
    with pytest.raises(CapabilityError, match=r"^thing is set to on.*no such thing$"):
        resolve("thing", Capability.ON, lacking)


def test_io_uring_leaves_no_descriptor_behind() -> None:
    before = os.listdir("/proc/self/fd")
    found = probe_io_uring()
    assert found.reason
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_io_uring_where_a_call_of_it_is_refused(call: str, code: int) -> None:
    """The probe says so; a store's engine falls back and says why; one that is to be io_uring is an OSError. Each names the
    call. (That the kernel lets a ring be set up here makes the test no stronger: without, all three are its refusal.)
    """
    probe, backend, reason, refused, refusal = json.loads(run_without({call: code}, TRY_URING))
    name = errno.errorcode[code]
    assert probe[0] is False
    assert probe[1].startswith(f"{name}: ")
    assert backend == "threads"
    assert refused == code
    assert os.strerror(code) in reason
    assert reason == refusal
    if probe_io_uring().available:
        told = {"io_uring_register": "enabling the io_uring"}.get(call, call)
        assert reason == f"{told}: {os.strerror(code)}"


TRY_URING = """
import json
from tierstore import _native as native
from tierstore.capabilities import probe_io_uring
found = probe_io_uring()
with native.Engine() as engine:
    chosen = [engine.backend, engine.backend_reason]
try:
    native.Engine(backend=native.IoBackend.URING)
except OSError as error:
    print(json.dumps([[found.available, found.reason], *chosen, error.errno, error.strerror]))
"""


@pytest.mark.skipif(
    NUMBERS["fallocate"] < 0, reason="the number of fallocate is not known on this architecture"
)
@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_fallocate_is_named(code: int, tmp_path: Path) -> None:
    """As ext2's, and those of NFS before 4.2: the probe says so, doctor too, and a store is refused and not left."""
    found = json.loads(run_without({"fallocate": code}, TRY_FALLOCATE, str(tmp_path)))
    name, kind = errno.errorcode[code], filesystem_type(tmp_path)
    reason = f"{name} from {kind}: a store cannot reserve its space here and is refused"
    assert found["probe"] == [False, reason]
    assert found["doctor"] == {
        "name": "fallocate", "setting": "auto", "effective": "off", "backend": "no store", "reason": reason,
    }  # fmt: skip
    assert found["refused"] == code
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
    assert found.reason.endswith("no file can be created to test it")


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[Callable[[int], bool], ...], reason: str
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


TRY_FALLOCATE = """
import json, sys
from dataclasses import astuple
from pathlib import Path
from click.testing import CliRunner
from tierstore.capabilities import probe_fallocate
from tierstore.cli.main import cli
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
folder = Path(sys.argv[1])
said = CliRunner().invoke(cli, ["doctor", "--json", "--dir", str(folder)]).stdout.splitlines()[-1]
found = {"probe": astuple(probe_fallocate(folder))}
found["doctor"] = next(each for each in json.loads(said)["capabilities"] if each["name"] == "fallocate")
try:
    with ParameterStore.create(folder / "s", [RecordSchema("r", 4096)], StoreConfig(host_budget=1 << 20)) as store:
        store.register("a", "r")
        store.commit()
except OSError as error:
    found["refused"] = error.errno
print(json.dumps(found))
"""


@pytest.mark.parametrize("probe", [probe_direct_io, probe_fallocate])
def test_probes_of_a_directory_leave_no_file_behind(probe: Callable[[Path], Finding], tmp_path: Path) -> None:
    assert probe(tmp_path).reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("probe", [probe_direct_io, probe_fallocate])
def test_probes_of_a_directory_that_is_not_there(probe: Callable[[Path], Finding], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        probe(tmp_path / "nowhere")


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
    assert probe_instructions("avx2", tmp_path).available is ("avx2" in sets)
    assert probe_instructions("avx512", tmp_path).available is ("avx512" in sets)


def test_mounts(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_bytes(
        b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        b"23 22 259:0 / /pmem rw,relatime - xfs /dev/pmem0 rw,attr2,dax=always\n"
        b"24 22 8:2 / /pm rw - tmpfs tmpfs rw\n"
        b"25 22 8:3 / /with\\040space rw - btrfs /dev/sdb rw\n"
        b"26 22 8:4 / /\xff rw - f2fs /dev/sdc rw\n"
        b"a line that is cut\n"
    )
    assert filesystem_type(Path("/pmem/store"), tmp_path) == "xfs"
    assert filesystem_type(Path("/pmemory"), tmp_path) == "ext4"
    assert filesystem_type(Path("/with space/x"), tmp_path) == "btrfs"
    assert filesystem_type(Path(os.fsdecode(b"/\xff/x")), tmp_path) == "f2fs"
    assert probe_dax(Path("/pmem/store"), tmp_path).available
    assert probe_dax(Path("/home"), tmp_path) == Finding(False, "/ (ext4) is not mounted with dax")
    assert filesystem_type(Path("/home"), tmp_path / "none") == "unknown"
