"""Drives that fail: each fault surfaces as the documented error, and the last commit stands.

The file system between the store and its directory is the tests' own (``faultfs``): the errors come from real
system calls, through the kernel.
"""

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store, weights
from fault_store import NUMEL, config
from faultfs import Action, FaultFs, Rule, unavailable
from slowness import mostly_slow

from tierstore import _native
from tierstore.errors import ChecksumError, StoreFormatError, StoreInUseError, StorePoisonedError
from tierstore.store import Group, IoBackendName, OpenAt, ParameterStore, RecordSchema
from tierstore.store.committing import Keep

BACKENDS = [name.value for name in IoBackendName if name is not IoBackendName.AUTO]
DIRECT = ["uring", "threads"]
EXTENTS, INDEX = "s/extents/*", "s/index/data.mdb"

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable() or "FUSE can be mounted")


@pytest.fixture
def fs(fast_path: Path) -> Iterator[FaultFs]:
    with FaultFs(fast_path) as mounted:
        yield mounted


def ones(*keys: str) -> dict[str, np.ndarray]:
    return {key: np.ones(NUMEL, np.float32) for key in keys}


def made(fs: FaultFs) -> Path:
    """A store of four records, one commit old."""
    small_store(fs.mount / "s").close()
    return fs.mount / "s"


def stands(path: Path, generations: tuple[int, ...] = (1,)) -> int:
    """The store reopens whole, at one of these generations."""
    with ParameterStore.open(path, config("uring")) as store:
        assert store.last_commit.generation in generations
        assert store.verify().failures == []
        if store.last_commit.generation == 1:
            with store.fetch(["e0"]) as lease:
                assert (lease["e0"].copy("weight") == weights(4, NUMEL)["e0"]).all()
        return store.last_commit.generation


# Reads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("section", ["weight", "exp_avg", "exp_avg_sq"])
def test_a_failed_read_names_key_section_and_file(fs: FaultFs, backend: str, section: str) -> None:
    path = made(fs)
    small = replace(config(backend), io=replace(config(backend).io, chunk_bytes=4096))
    with ParameterStore.open(path, small) as store:
        crc = store.records_crc32c()
    group = Group.WEIGHTS if section == "weight" else Group.MOMENTS
    with ParameterStore.open(path, small) as store:
        slot, layout = store.core.record("e2").slot(group), store.info("e2").schema.layout(group)
        at = slot.number * layout.slot_bytes
        for part in layout.sections:
            if part.name == section:
                break
            at += part.padded_nbytes
        extent = f"s/extents/expert.{group.label}"
        fs.add(Rule(op="read", action=Action.FAIL, path=extent, at=at))
        with pytest.raises(OSError, match=f"record 'e2', section {section}: read at offset {at}") as caught:
            store.fetch(["e2"], [group])
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(fs.mount / extent))
        (failure,) = store.verify().failures
        assert all(word in failure for word in ("'e2'", extent, "Input/output error"))
        with store.fetch(["e0", "e1", "e3"], [group]):
            pass  # the others are as good as ever
        fs.clear()
        assert store.verify().failures == []
    with ParameterStore.open(path, config(backend)) as store:
        assert store.records_crc32c() == crc


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_depends_on_a_failed_read_is_never_committed(fs: FaultFs, backend: str) -> None:
    path = made(fs)
    with ParameterStore.open(path, config(backend)) as store:
        fs.add(Rule(op="read", action=Action.FAIL, path=EXTENTS))
        store.update(ones("e1"), lr=0.1)
        with pytest.raises(OSError, match="read at offset") as caught:
            store.commit()
        assert caught.value.errno == errno.EIO
        fs.clear()
        with pytest.raises(StorePoisonedError, match="reopen the store at its last commit"):
            store.commit()
    stands(path)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bit", [0, 8 * 4 * NUMEL - 1])
def test_a_bit_flipped_on_the_way_is_never_trained_on(fs: FaultFs, backend: str, bit: int) -> None:
    path = made(fs)
    with ParameterStore.open(path, config(backend)) as store:
        slot = store.core.record("e2").slot(Group.WEIGHTS)
        at = slot.number * store.info("e2").schema.layout(Group.WEIGHTS).slot_bytes + bit // 8
        fs.add(Rule(op="read", action=Action.FLIP, path="s/extents/expert.weights", at=at, bit=bit % 8))
        with pytest.raises(ChecksumError, match="'e2', section weight") as caught:
            store.fetch(["e2"])
        assert str(fs.mount / "s/extents/expert.weights") in str(caught.value)
        store.update(ones("e2"), lr=0.1)
        with pytest.raises(ChecksumError, match="section weight"):
            store.commit()
    fs.clear()
    stands(path)


@pytest.mark.parametrize("backend", DIRECT)
def test_a_bit_flipped_as_it_is_written_is_found_when_it_is_read(fs: FaultFs, backend: str) -> None:
    path = made(fs)
    with ParameterStore.open(path, config(backend)) as store:
        store.update(ones("e1"), lr=0.1)
        fs.add(Rule(op="write", action=Action.FLIP, path="s/extents/expert.moments", bit=77))
        assert store.commit() == 2
    fs.clear()
    with ParameterStore.open(path, config(backend)) as store:
        (failure,) = store.verify().failures
        assert "'e1', section exp_avg" in failure
        with pytest.raises(ChecksumError, match="'e1', section exp_avg"):
            store.fetch(["e1"], [Group.MOMENTS])


@pytest.mark.parametrize("backend", DIRECT)
def test_a_write_that_was_lost_is_found_when_it_is_read(fs: FaultFs, backend: str) -> None:
    """A drive that acknowledges what it never wrote."""
    path = made(fs)
    with ParameterStore.open(path, config(backend)) as store:
        store.update(ones("e1"), lr=0.1)
        fs.add(Rule(op="write", action=Action.LOSE, path="s/extents/expert.weights"))
        assert store.commit() == 2
    fs.clear()
    with (
        ParameterStore.open(path, config(backend)) as store,
        pytest.raises(ChecksumError, match="'e1', section"),
    ):
        store.fetch(["e1"])


# Writes, syncs and space ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", mostly_slow(BACKENDS, "uring"))
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ENOSPC])
@pytest.mark.parametrize("op", ["write", "fsync"])
@pytest.mark.parametrize("file", ["s/extents/expert.moments", INDEX])
def test_a_failed_write_or_sync_poisons(fs: FaultFs, backend: str, code: int, op: str, file: str) -> None:
    path = made(fs)
    with ParameterStore.open(path, config(backend)) as store:
        store.update(ones("e1"), lr=0.1)
        fs.add(Rule(op=op, action=Action.FAIL, path=file, errno=code, times=1))
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            store.commit()
        assert (caught.value.errno, caught.value.filename) == (code, str(fs.mount / file))
        assert fs.fired == [1]
        # The drive is well again, and still nothing is retried: what a failed sync lost, nobody can say.
        for use in (store.commit, store.records_crc32c, lambda: store.fetch(["e1"])):
            with pytest.raises(StorePoisonedError, match="reopen"):
                use()
    stands(path, (1,) if file != INDEX else (1, 2))


def test_a_failed_sync_of_a_directory_poisons(fs: FaultFs) -> None:
    path = made(fs)
    with ParameterStore.open(path, config("uring")) as store:
        store.reserve({"expert": 40})
        fs.add(Rule(op="fsyncdir", action=Action.FAIL, path="s/extents"))
        with pytest.raises(OSError, match="Input/output error") as caught:
            store.commit()
        assert caught.value.filename == str(path / "extents")
        with pytest.raises(StorePoisonedError):
            store.commit()
    stands(path)


@pytest.mark.parametrize("file", ["s/extents/expert.moments", INDEX])
def test_no_space_for_a_reservation_changes_nothing(fs: FaultFs, file: str) -> None:
    path = made(fs)
    with ParameterStore.open(path, config("uring")) as store:
        fs.add(Rule(op="fallocate", action=Action.FAIL, path=file, errno=errno.ENOSPC))
        with pytest.raises(OSError, match="more bytes") as caught:
            store.reserve({"expert": 4000})
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(fs.mount / file))
        if file != INDEX:  # its space is there since it was made
            with pytest.raises(OSError, match="more bytes"):
                store.update(ones("e1"), lr=0.1)
        fs.clear()
        store.update(ones("e1"), lr=0.1)
        assert store.commit() == 2
    stands(path, (2,))


def first_commit(path: Path) -> None:
    with ParameterStore.create(path, [RecordSchema("expert", NUMEL)], config("uring")) as store:
        store.register("e", "expert")
        store.commit()


def test_a_failed_rename_or_sync_at_creation_leaves_no_store(fs: FaultFs) -> None:
    for number, rule in enumerate(
        [
            Rule(op="rename", action=Action.FAIL),
            Rule(op="fsyncdir", action=Action.FAIL, path="*/extents"),
            Rule(op="write", action=Action.FAIL, path="*/tierstore.json.new", errno=errno.ENOSPC),
            Rule(op="mkdir", action=Action.FAIL, path="*/index", errno=errno.EROFS),
            Rule(op="create", action=Action.FAIL, path="*/extents/*", errno=errno.ENOSPC),
        ]
    ):
        fs.add(rule)
        with pytest.raises(OSError, match=os.strerror(rule.errno)) as caught:
            first_commit(fs.mount / f"t{number}")
        assert caught.value.errno == rule.errno
        assert not (fs.mount / f"t{number}").exists()
        fs.clear()
        with small_store(fs.mount / f"t{number}") as store:
            assert store.last_commit.generation == 1


# Slow, or little at a time ----------------------------------------------------------------------------------


def trained(fs: FaultFs, backend: str, name: str) -> tuple[int, int]:
    """The checksum of a short run and of all it read, and transfers that were continued."""
    # So small that records are evicted, and read again behind their write.
    small = replace(config(backend), host_budget=60_000)
    small_store(fs.mount / name).close()
    crc = 0
    with ParameterStore.open(fs.mount / name, small) as store:
        for step in range(4):
            store.update(ones("e0", f"e{1 + step % 3}"), lr=0.1)
            store.commit()
            for key in store.keys:
                with store.fetch([key]) as lease:
                    crc = _native.crc32c(lease[key].copy("weight").view(np.uint8), crc)
        continued = store.core.engine.stats()["continued_transfers"]
        return crc ^ store.records_crc32c(), int(continued)


@pytest.mark.parametrize("backend", DIRECT)
def test_short_transfers_are_continued(fs: FaultFs, backend: str) -> None:
    expected, _ = trained(fs, backend, "a")
    fs.add(Rule(op="write", action=Action.SHORT, path="b/extents/*", nbytes=4096, after=8))
    found, continued = trained(fs, backend, "b")
    assert (found, continued > 0) == (expected, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_delays_change_times_alone(fs: FaultFs, backend: str) -> None:
    expected, _ = trained(fs, backend, "a")
    fs.add(Rule(op="write", action=Action.DELAY, path="b/extents/*", seconds=0.02, after=8, times=20))
    for op in ("read", "fsync"):
        fs.add(Rule(op=op, action=Action.DELAY, path="b/*", seconds=0.02, after=2, times=4))
    assert trained(fs, backend, "b")[0] == expected
    assert backend == "pmem" or fs.fired[0] > 0


# The index --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["read", "open"])
def test_an_index_that_cannot_be_read_is_an_error_of_its_drive(fs: FaultFs, op: str) -> None:
    path = made(fs)
    fs.add(Rule(op=op, action=Action.FAIL, path=INDEX))
    with pytest.raises(OSError, match="Input/output error") as caught:
        ParameterStore.open(path, config("uring"))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(fs.mount / INDEX))
    fs.clear()
    for page in (2, 5):
        fs.add(Rule(op="read", action=Action.FAIL, path=INDEX, at=page * 4096))
    with pytest.raises(OSError, match="Input/output error") as caught:
        ParameterStore.open(path, config("uring"))
    assert caught.value.filename == str(fs.mount / INDEX)
    fs.clear()
    stands(path)


@pytest.mark.parametrize("at", [OpenAt.LAST, OpenAt.PREVIOUS])
def test_a_bit_flipped_as_the_index_is_written_is_found(fs: FaultFs, at: OpenAt) -> None:
    """In the content of an entry, where nothing of LMDB's own can tell."""
    path = made(fs)
    with ParameterStore.open(path, config("uring")) as store:
        store.update(ones("e1"), lr=0.1)
        fs.add(Rule(op="write", action=Action.FLIP, path=INDEX, holding="needle", bit=3, times=1))
        store.core.committer.commit({"s": b"a haystack with a needle in it"}, keep=Keep.PREVIOUS)
        assert fs.fired == [1]
    fs.clear()
    with pytest.raises(StoreFormatError, match="damaged"):
        ParameterStore.open(path, config("uring"), at=at)


# A drive that is pulled out ---------------------------------------------------------------------------------


def outcomes(fs: FaultFs, backend: str, steps: list[str], rule: Rule) -> list[list[object]]:
    """What each step came to in a process of its own, which must end by itself, and soon."""
    child = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("fault_store.py"), made(fs), backend, *steps],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert json.loads(child.stdout.readline())[:2] == ["open", "ok"]
        fs.add(rule)
        out, _ = child.communicate("go\n", 30)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0  # no signal, SIGBUS above all
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize("backend", mostly_slow(BACKENDS, "uring"))
@pytest.mark.parametrize(
    ("op", "path", "step"),
    [
        ("read", EXTENTS, "fetch"),
        ("write", EXTENTS, "commit"),
        ("fsync", EXTENTS, "commit"),
        ("write", INDEX, "commit"),
    ],
)
def test_a_drive_that_is_pulled_out_stops_the_run(
    fs: FaultFs, backend: str, op: str, path: str, step: str
) -> None:
    steps = ["fetch", "update", "commit", "verify", "close"]
    result = {
        row[0]: row[1:] for row in outcomes(fs, backend, steps, Rule(op=op, action=Action.VANISH, path=path))
    }
    assert list(result) == steps
    kind, code, file, message = result[step]
    gone = {errno.ECONNABORTED, errno.ENOTCONN, errno.EIO}
    assert code in gone, message
    assert str(file).startswith(str(fs.mount / "s")), message
    assert kind in ("OSError", "ConnectionAbortedError")
    assert result["verify"][0] == "StorePoisonedError"
    assert result["close"] == ["ok", 0, "", ""]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_is_cut_short_is_an_error_and_no_signal(
    fs: FaultFs, backend: str, tmp_path: Path
) -> None:
    """Under a mapping the missing pages would be a SIGBUS."""
    small_store(tmp_path / "s").close()
    with ParameterStore.open(tmp_path / "s", config(backend)) as store:
        with store.fetch(["e0"]):
            pass
        os.truncate(tmp_path / "s/extents/expert.weights", 4096)
        with pytest.raises(OSError, match="'e3', section weight") as caught:
            store.fetch(["e3"])
        assert caught.value.errno == errno.EIO


# A process that is killed -----------------------------------------------------------------------------------


def opened_in_time(path: Path) -> ParameterStore:
    """The store, as soon as nobody has it any more."""
    until = time.monotonic() + 20
    while True:
        try:
            return ParameterStore.open(path, config("uring"))
        except StoreInUseError:
            assert time.monotonic() < until


@pytest.mark.parametrize("backend", mostly_slow(DIRECT, "uring"))
def test_no_other_opens_before_a_killed_ones_writes_have_ended(fs: FaultFs, backend: str) -> None:
    """Also where its lease has been removed: the directory is locked until then. Each write takes most of a second."""
    path = made(fs)
    command = [sys.executable, str(Path(__file__).with_name("fault_store.py")), str(path), backend]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*command, "update", "commit"], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            assert '"open"' in process.stdout.readline()
            fs.add(Rule(op="write", action=Action.DELAY, path=EXTENTS, seconds=0.8))
            process.stdin.write("\n")
            process.stdin.flush()
            assert '"update"' in process.stdout.readline()
            while not fs.fired[0]:
                time.sleep(0.01)
            (path / "lease").unlink()
            process.kill()
            with opened_in_time(path) as store:
                before = {file.name: file.read_bytes() for file in (fs.behind / "s/extents").iterdir()}
                time.sleep(1)
                assert {
                    file.name: file.read_bytes() for file in (fs.behind / "s/extents").iterdir()
                } == before
                assert (store.last_commit.generation, store.verify().failures) == (1, [])
        finally:
            process.kill()
