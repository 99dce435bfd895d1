"""Files in memory: what the backend does that no other does. The contract that all share is tested with them."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest_store import flip_bit
from effort import share, with_fixtures
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native as native


@pytest.fixture
def engine() -> Iterator[native.Engine]:
    engine = native.Engine(backend=native.IoBackend.PMEM, chunk_bytes=4096)
    yield engine
    engine.close()


def buffer(nbytes: int, values: bytes | None = None) -> native.Buffer:
    room = -(-nbytes // 4096) * 4096
    made = native.Buffer(native.Arena(room, native.HugePages.OFF), [(0, room)], nbytes)
    if values is not None:
        made.array()[:] = np.frombuffer(values, np.uint8)
    return made


@with_fixtures(share(40))
@given(
    transfers=st.lists(
        st.tuples(st.booleans(), st.integers(0, 30_000), st.integers(1, 9000)), min_size=1, max_size=12
    ),
    seed=st.integers(0, 1 << 16),
)
def test_any_byte_range_reads_and_writes_as_a_bytearray_does(
    engine: native.Engine, tmp_path: Path, transfers: list[tuple[bool, int, int]], seed: int
) -> None:
    """Nothing is staged: offsets and lengths are any bytes, and a write past the end lengthens the file."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "data"
    path.unlink(missing_ok=True)
    want = bytearray()
    with native.File(path, create=native.FileCreate.YES, direct=native.DirectIo.OFF) as file:
        for write, offset, nbytes in transfers:
            if write:
                values = rng.bytes(nbytes)
                engine.wait(engine.write(file, offset, [buffer(nbytes, values)], align=1))
                want.extend(bytes(max(0, offset + nbytes - len(want))))
                want[offset : offset + nbytes] = values
            elif offset + nbytes <= len(want):
                target = buffer(nbytes)
                engine.wait(engine.read(file, offset, [target], align=1))
                assert target.array().tobytes() == want[offset : offset + nbytes]
            else:
                ticket = engine.read(file, offset, [buffer(nbytes)], align=1)
                with pytest.raises(OSError, match="end of file"):
                    engine.wait(ticket)
        engine.wait(engine.sync(file))
    assert path.read_bytes() == bytes(want)


def test_what_system_calls_write_is_what_the_mapping_reads_and_the_other_way(
    engine: native.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"a" * 10_000)
    with native.File(path, direct=native.DirectIo.OFF) as file:
        target = buffer(10_000)
        engine.wait(engine.read(file, 0, [target], align=1))
        assert target.array().tobytes() == b"a" * 10_000
        with path.open("r+b") as plain:
            plain.seek(5000)
            plain.write(b"b" * 100)
        engine.wait(engine.read(file, 0, [target], align=1))
        assert target.array().tobytes() == path.read_bytes()
        engine.wait(engine.write(file, 9990, [buffer(4, b"cccc")], align=1))
        assert path.read_bytes()[9985:9999] == b"aaaaaccccaaaaa"


def test_a_file_that_grows_is_mapped_anew_while_reads_are_in_flight(
    engine: native.Engine, tmp_path: Path
) -> None:
    with native.File(tmp_path / "data", create=native.FileCreate.YES, direct=native.DirectIo.OFF) as file:
        file.allocate(0, 1 << 20)
        engine.wait(engine.write(file, 0, [buffer(1 << 20, b"x" * (1 << 20))]))
        targets = [buffer(1 << 20) for _ in range(4)]
        tickets = [engine.read(file, 0, [target]) for target in targets]
        file.allocate(1 << 20, 1 << 20)
        engine.wait(engine.write(file, 1 << 20, [buffer(4096, b"y" * 4096)]))
        engine.wait_all(tickets)
        for target in targets:
            assert target.array().tobytes() == b"x" * (1 << 20)
        file.punch(0, 4096)
        engine.wait(engine.read(file, 0, [targets[0]]))
        assert not targets[0].array()[:4096].any()
        engine.wait(engine.sync(file))


def test_bytes_are_leased_where_a_mapping_has_them_and_checked(engine: native.Engine, tmp_path: Path) -> None:
    """The second page of three, 4,000 bytes of it. The view outlives the file; a flipped bit is a mismatch that names it."""
    content = np.random.default_rng(0).bytes(3 * 4096)
    path = tmp_path / "data"
    path.write_bytes(content)
    crcs = native.CrcTable(2)
    with native.File(path, direct=native.DirectIo.OFF) as file:
        section = file.map(4096, 4000)
        crcs.array()[1] = native.crc32c(np.frombuffer(content, np.uint8)[4096:8096])
        engine.wait(engine.verify_mapped(file, 4096, section, crcs, 1))
        flip_bit(path, 8 * 5000)
        ticket = engine.verify_mapped(file, 4096, section, crcs, 1)
        with pytest.raises(native.ChecksumMismatch) as caught:
            engine.wait(ticket)
        assert (caught.value.path, caught.value.file_offset) == (str(path), 4096)
        with pytest.raises(OSError, match="end of file") as short:
            file.map(2 * 4096, 4097)
        assert (short.value.errno, short.value.filename) == (errno.EIO, str(path))
    path.unlink()
    assert section.contiguous
    assert section.array().tobytes()[1000:] == content[5096:8096]


def test_map_sync_is_off_on_for_real_or_refused(tmp_path: Path) -> None:
    """On a file system that is not DAX, ON is an error that names the file, and AUTO says why it is off."""
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    with native.File(path, direct=native.DirectIo.OFF) as file:
        reason = file.map_sync_reason()
    engine = native.Engine(backend=native.IoBackend.PMEM, map_sync=native.MapSync.ON)
    try:
        with native.File(path, direct=native.DirectIo.OFF) as file:
            if reason == "":
                engine.wait(engine.write(file, 0, [buffer(4096, b"z" * 4096)]))
            else:
                ticket = engine.write(file, 0, [buffer(4096, b"z" * 4096)])
                with pytest.raises(OSError, match="write at offset 0") as refused:
                    engine.wait(ticket)
                assert refused.value.errno in (errno.EOPNOTSUPP, errno.EINVAL)
                assert refused.value.filename == str(path)
                assert path.read_bytes() == bytes(8192)
    finally:
        engine.close()


def test_a_full_disk_is_an_error_and_not_a_signal(small_disk: Path) -> None:
    """A store to a hole of a sparse file on a full file system would be a SIGBUS."""
    engine = native.Engine(backend=native.IoBackend.PMEM)
    with native.File(small_disk / "data", create=native.FileCreate.YES, direct=native.DirectIo.OFF) as file:
        os.truncate(file.path, 64 << 20)
        block = buffer(1 << 20, b"f" * (1 << 20))
        tickets = [engine.write(file, offset, [block]) for offset in range(0, 64 << 20, 1 << 20)]
        with pytest.raises(OSError, match="No space left") as full:
            engine.wait_all(tickets)
        assert full.value.errno == errno.ENOSPC
        assert full.value.filename == file.path
        assert engine.poisoned is not None
    engine.close()
