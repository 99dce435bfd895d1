"""Reads, writes and syncs: bytes, padding, checksums, short transfers, errors, poison."""

import errno
import fcntl
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from child_process import run_python
from conftest_store import flip_bit
from effort import share, with_fixtures
from engines import MakeEngine, files_of_at_most
from hypothesis import given
from hypothesis import strategies as st
from naive_crc32c import naive_crc32c

from tierstore import _native as native


def scattered(arena: native.Arena, frames: list[int], nbytes: int) -> native.Buffer:
    return native.Buffer(arena, [(4096 * frame, 4096) for frame in frames], nbytes)


def content_of(buffer: native.Buffer) -> np.ndarray:
    out = np.empty(buffer.nbytes, dtype=np.uint8)
    buffer.copy_to(out)
    return out


def test_the_checksum_is_crc32c() -> None:
    assert naive_crc32c(b"123456789") == 0xE3069283
    assert naive_crc32c(b"123456789") != zlib.crc32(b"123456789")


def test_a_record_lies_in_the_file_as_written_down(
    engine: native.Engine, arena: native.Arena, file: native.File, rng: np.random.Generator
) -> None:
    # Two sections, 5000 and 100 bytes, at 8192: the second starts at 8192 + 8192, both padded with zeros.
    arena.view()[:] = 0xAA
    first, second = scattered(arena, [7, 3], 5000), scattered(arena, [9], 100)
    one, two = rng.integers(0, 256, 5000, dtype=np.uint8), rng.integers(0, 256, 100, dtype=np.uint8)
    first.copy_from(one)
    second.copy_from(two)
    crcs = native.CrcTable(5)
    wrote = engine.write(file, 8192, [first, second], crcs, 2)
    engine.wait(engine.sync(file, after=[wrote]))
    assert crcs.array().tolist() == [0, 0, naive_crc32c(one.tobytes()), naive_crc32c(two.tobytes()), 0]
    raw = Path(file.path).read_bytes()
    expected = one.tobytes() + bytes(8192 - 5000) + two.tobytes() + bytes(4096 - 100)
    assert raw[8192 : 8192 + 12288] == expected
    assert not any(raw[:8192])
    assert not any(raw[8192 + 12288 :])
    stats = engine.stats()
    assert (stats["writes"], stats["written_bytes"], stats["syncs"]) == (1, 12288, 1)

    back_one, back_two = scattered(arena, [20, 18], 5000), scattered(arena, [30], 100)
    engine.wait(engine.read(file, 8192, [back_one, back_two], crcs, 2))
    assert np.array_equal(content_of(back_one), one)
    assert np.array_equal(content_of(back_two), two)
    assert engine.stats()["read_bytes"] == 12288


@pytest.mark.parametrize("section", [0, 1])
def test_a_flipped_bit_is_found(
    engine: native.Engine, arena: native.Arena, file: native.File, section: int
) -> None:
    sections = [scattered(arena, [1, 2], 8000), scattered(arena, [5], 4096)]
    crcs = native.CrcTable(2)
    engine.wait(engine.write(file, 4096, sections, crcs))
    at = 4096 + (7999 if section == 0 else 8192)
    flip_bit(Path(file.path), 8 * at + 4)
    good = int(crcs.array()[section])
    ticket = engine.read(file, 4096, sections, crcs)
    follower = engine.fill_zero(sections[0], after=[ticket])
    for waited in (ticket, ticket, follower):
        with pytest.raises(native.ChecksumMismatch, match="crc32c") as error:
            engine.wait(waited)
        assert error.value.args[1:] == (file.path, [4096, 12288][section], section)
        assert (error.value.path, error.value.section_index) == (file.path, section)
        assert error.value.file_offset == [4096, 12288][section]
        assert error.value.expected == good
        assert error.value.actual != good
    assert engine.poisoned is None
    crcs.array()[section] = error.value.actual
    engine.wait(engine.read(file, 4096, sections, crcs))


def test_padding_beyond_the_content_is_not_checked(
    engine: native.Engine, arena: native.Arena, file: native.File
) -> None:
    crcs = native.CrcTable(1)
    section = scattered(arena, [1], 100)
    engine.wait(engine.write(file, 0, [section], crcs))
    with open(file.path, "r+b") as plain:
        plain.seek(100)
        plain.write(b"noise")
    engine.wait(engine.read(file, 0, [section], crcs))


def test_long_vectors_are_continued(
    make_engine: MakeEngine, file: native.File, rng: np.random.Generator
) -> None:
    # 2048 pieces in one chunk: more than one system call takes (IOV_MAX is 1024).
    engine = make_engine(chunk_bytes=8 << 20)
    arena = native.Arena(16 << 20)
    file.allocate(0, 8 << 20)
    frames = [int(frame) * 2 for frame in rng.permutation(2048)]
    source = scattered(arena, frames, 8 << 20)
    content = rng.integers(0, 256, 8 << 20, dtype=np.uint8)
    source.copy_from(content)
    engine.wait(engine.write(file, 0, [source]))
    assert Path(file.path).read_bytes() == content.tobytes()
    source.copy_from(np.zeros_like(content))
    engine.wait(engine.read(file, 0, [source]))
    assert np.array_equal(content_of(source), content)


@with_fixtures(share(25))
@given(data=st.data())
def test_any_offset_size_and_memory_goes_round(
    make_engine: MakeEngine, tmp_path: Path, data: st.DataObject
) -> None:
    """Unaligned heads, tails and memory: direct where it can be, buffered where it must be."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    direct = data.draw(st.sampled_from([native.DirectIo.OFF, native.DirectIo.AUTO]))
    with native.File(tmp_path / "any", create=native.FileCreate.YES, direct=direct) as file:
        file.allocate(0, 1 << 18)
        arena = native.Arena(1 << 18, native.HugePages.OFF)
        before = rng.integers(0, 256, 1 << 18, dtype=np.uint8)
        Path(file.path).write_bytes(before.tobytes())
        offset = data.draw(st.one_of(st.integers(0, 9000), st.sampled_from([0, 512, 4096, 8192])))
        align = data.draw(st.sampled_from([1, 512, 4096]))
        sections, at, expected = [], 0, before.copy()
        place = offset
        for nbytes in data.draw(st.lists(st.integers(1, 20000), min_size=1, max_size=4)):
            at += data.draw(st.sampled_from([0, 1, 512, 4096]))
            padded = -(-nbytes // align) * align
            half = padded // 2
            sections.append(native.Buffer(arena, [(at, half), (at + half + 4096, padded - half)], nbytes))
            at += padded + 4096
            content = rng.integers(0, 256, nbytes, dtype=np.uint8)
            sections[-1].copy_from(content)
            expected[place : place + padded] = 0
            expected[place : place + nbytes] = content
            place += padded
        engine = make_engine(chunk_bytes=data.draw(st.sampled_from([4096, 1 << 20])), queue_depth=4)
        crcs = native.CrcTable(len(sections))
        engine.wait(engine.write(file, offset, sections, crcs, align=align))
        assert np.array_equal(np.fromfile(file.path, dtype=np.uint8), expected)
        wanted = [content_of(section).copy() for section in sections]
        arena.view()[:] = 0x55
        engine.wait(engine.read(file, offset, sections, crcs, align=align))
        for section, content in zip(sections, wanted, strict=True):
            assert np.array_equal(content_of(section), content)
        engine.close()


@pytest.mark.parametrize("size", [0, 4096, 10000])
def test_a_truncated_file_is_an_error_not_a_short_read(
    engine: native.Engine, arena: native.Arena, file: native.File, size: int
) -> None:
    os.truncate(file.path, size)
    section = scattered(arena, [1, 2, 3], 12288)
    with pytest.raises(OSError, match="unexpected end of file") as error:
        engine.wait(engine.read(file, 0, [section]))
    assert error.value.errno == errno.EIO
    assert error.value.filename == file.path
    assert engine.poisoned is None
    assert engine.stats()["failed_ops"] == 1


def test_a_write_that_fails_poisons_the_engine(
    engine: native.Engine, arena: native.Arena, file: native.File
) -> None:
    arena.view()[:] = 3
    # The first 4096 bytes of the write still fit: a short write, whose continuation fails.
    with files_of_at_most((1 << 20) + 4096):
        ticket = engine.write(file, 1 << 20, [scattered(arena, [1, 2], 8192)])
        follower = engine.copy(scattered(arena, [3], 4096), scattered(arena, [1], 4096), after=[ticket])
        for waited in (ticket, follower):
            with pytest.raises(OSError, match="write at offset") as error:
                engine.wait(waited)
            assert error.value.errno == errno.EFBIG
            assert error.value.filename == file.path
    assert file.path in engine.poisoned
    for refused in (engine.sync(file), engine.write(file, 0, [scattered(arena, [4], 4096)])):
        with pytest.raises(OSError, match="write at offset"):
            engine.wait(refused)
    assert not any(Path(file.path).read_bytes()[:4096])
    engine.wait(engine.read(file, 0, [scattered(arena, [4], 4096)]))  # reading goes on


def test_a_full_disk(make_engine: MakeEngine, arena: native.Arena, tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size=64k tmpfs '{mount}' 2>/dev/null") != 0:
        pytest.skip("cannot mount a small file system here")
    try:
        engine = make_engine()
        with native.File(mount / "data", create=native.FileCreate.YES) as file:
            with pytest.raises(OSError, match="fallocate of 1048576 bytes") as error:
                file.allocate(0, 1 << 20)
            assert (error.value.errno, error.value.filename) == (errno.ENOSPC, file.path)
            frames = list(range(32))
            with pytest.raises(OSError, match="write at offset") as error:
                engine.wait(engine.write(file, 0, [scattered(arena, frames, 32 * 4096)]))
            assert (error.value.errno, error.value.filename) == (errno.ENOSPC, file.path)
            assert engine.poisoned
        engine.close()
    finally:
        os.system(f"umount '{mount}'")


def test_arguments_that_cannot_work(engine: native.Engine, arena: native.Arena, file: native.File) -> None:
    section = scattered(arena, [1], 4096)
    with pytest.raises(ValueError, match="needs room for 8192"):
        engine.read(file, 0, [native.Buffer(arena, [(0, 5000)], 5000)])
    with pytest.raises(ValueError, match="no entries"):
        engine.read(file, 0, [section, section], native.CrcTable(2), 1)
    with pytest.raises(ValueError, match="power of two"):
        engine.read(file, 0, [section], align=3000)
    with pytest.raises(ValueError, match="no bytes"):
        engine.read(file, 0, [])
    with pytest.raises((TypeError, RuntimeError)):
        engine.read(file, 0, [arena])  # type: ignore[list-item]
    file.close()
    with pytest.raises(OSError, match="closed"):
        engine.read(file, 0, [section])
    assert engine.stats()["reads"] == 0


def test_closing_a_file_leaves_what_is_in_flight_alone(
    engine: native.Engine, arena: native.Arena, tmp_path: Path
) -> None:
    file = native.File(tmp_path / "data", create=native.FileCreate.YES)
    file.allocate(0, 1 << 20)
    gate = engine.external()
    section = scattered(arena, [1], 4096)
    section.array()[:] = 9
    ticket = engine.write(file, 0, [section], after=[gate])
    file.close()
    engine.complete_external(gate)
    engine.wait(ticket)
    assert (tmp_path / "data").read_bytes()[:4096] == b"\x09" * 4096


def test_options_that_cannot_work(make_engine: MakeEngine) -> None:
    for options in ({"chunk_bytes": 1000}, {"chunk_bytes": 0}, {"compute_threads": 0}):
        with pytest.raises(ValueError, match="must be"):
            make_engine(**options)
    with pytest.raises(ValueError, match="io_threads"):
        native.Engine(backend=native.IoBackend.THREADS, io_threads=0)
    with pytest.raises((ValueError, OSError)):
        native.Engine(backend=native.IoBackend.URING, queue_depth=0)


def test_auto_says_what_it_resolved_to() -> None:
    with native.Engine() as engine:
        assert engine.backend in ("uring", "threads")
        assert (engine.backend == "uring") == (engine.backend_reason == "")


ONE_DESCRIPTOR_LEFT = """
import contextlib, errno, os, resource, sys
from tierstore import _native as native

arena = native.Arena(65536, native.HugePages.OFF)
file = native.File(sys.argv[1], create=native.FileCreate.YES)
native.Engine(backend=native.IoBackend.URING).close()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
taken = []
with contextlib.suppress(OSError):
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
os.close(taken.pop())
try:
    native.Engine(backend=native.IoBackend.URING)
except OSError as refused:
    assert refused.errno == errno.EMFILE and "io_uring_setup" in str(refused), refused
else:
    raise AssertionError("a ring was made of one descriptor")
with native.Engine() as engine:
    assert engine.backend == "threads"
    assert "io_uring_setup: Too many open files" in engine.backend_reason
    engine.wait(engine.write(file, 0, [native.Buffer(arena, [(0, 4096)], 4096)]))
print("fell back")
"""


def test_auto_falls_back_and_says_why(tmp_path: Path) -> None:
    """With one descriptor left, a ring finds none for itself beside its wake.

    In a process of its own: here, whatever earlier tests left to the garbage collector gives descriptors back."""
    try:
        native.Engine(backend=native.IoBackend.URING).close()
    except OSError as error:
        pytest.skip(f"no uring here: {error}")
    assert run_python(ONE_DESCRIPTOR_LEFT, tmp_path / "file").stdout == "fell back\n"


def test_a_ring_holds_the_locks(arena: native.Arena, file: native.File, tmp_path: Path) -> None:
    """A flock that the ring shares, of a file or a directory, lasts until its engine has closed, even when its descriptor
    has gone.
    """
    (tmp_path / "lease").touch()
    paths = [tmp_path / "lease", tmp_path]
    locks = [os.open(path, os.O_RDONLY) for path in paths]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        engine = native.Engine(backend=native.IoBackend.URING, lease_fds=locks)
    except OSError as error:
        pytest.skip(f"no uring here: {error}")
    finally:
        for lock in locks:
            os.close(lock)
    engine.wait(engine.write(file, 0, [scattered(arena, [1], 4096)]))
    others = [os.open(path, os.O_RDONLY) for path in paths]
    for other in others:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    engine.close()
    for other in others:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
