"""Files: two descriptors, allocation, errors with errno and path."""

import errno
import os
from pathlib import Path

import pytest
from engines import files_of_at_most

from tierstore import _native as native


def test_a_file_that_is_missing_or_made(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with pytest.raises(FileNotFoundError) as error:
        native.File(path)
    assert error.value.filename == str(path)
    with native.File(path, create=native.FileCreate.YES) as file:
        assert (file.path, file.size, file.closed) == (str(path), 0, False)
    assert file.closed
    with pytest.raises(OSError, match="closed") as closed:
        _ = file.size
    assert closed.value.errno == errno.EBADF
    file.close()


def test_direct_io_says_what_it_resolved_to(tmp_path: Path) -> None:
    path = tmp_path / "data"
    off = native.File(path, create=native.FileCreate.YES, direct=native.DirectIo.OFF)
    assert not off.direct
    assert off.direct_reason
    auto = native.File(path)
    assert auto.direct == (auto.direct_reason == "")
    if auto.direct:
        assert auto.offset_alignment in (512, 1024, 2048, 4096)
        assert native.File(path, direct=native.DirectIo.ON).direct
    else:
        with pytest.raises(OSError, match="O_DIRECT"):
            native.File(path, direct=native.DirectIo.ON)


def test_allocate_reserves_blocks_and_punch_gives_them_back(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with native.File(path, create=native.FileCreate.YES) as file:
        file.allocate(0, 1 << 20)
        assert file.size == 1 << 20
        assert path.stat().st_blocks * 512 >= 1 << 20
        with path.open("r+b") as plain:
            plain.write(b"x" * 8192)
        file.punch(0, 4096)
        assert file.size == 1 << 20
        assert path.read_bytes()[:8192] == bytes(4096) + b"x" * 4096
        assert path.stat().st_blocks * 512 < (1 << 20) + 4096


def test_allocating_too_much_is_an_oserror_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "data"
    with native.File(path, create=native.FileCreate.YES) as file:
        with (
            files_of_at_most(1 << 20),
            pytest.raises(OSError, match="fallocate of 4194304 bytes") as error,
        ):
            file.allocate(0, 4 << 20)
        assert error.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert error.value.filename == str(path)
        assert file.size == 0


def test_a_full_disk_is_left_as_it_was(small_disk: Path) -> None:
    """ext4 allocates what it can before it finds that the rest is not there."""
    with native.File(small_disk / "data", create=native.FileCreate.YES) as file:
        file.allocate(0, 1 << 20)
        free = os.statvfs(small_disk).f_bfree
        with pytest.raises(OSError, match="fallocate of 67108864 bytes") as error:
            file.allocate(1 << 20, 64 << 20)
        assert (error.value.errno, error.value.filename) == (errno.ENOSPC, file.path)
        assert file.size == 1 << 20
        assert os.statvfs(small_disk).f_bfree >= free - 8  # a block for the extent tree may stay


def test_descriptors_are_closed_on_exec(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with native.File(tmp_path / "data", create=native.FileCreate.YES):
        opened = [fd for fd in os.listdir("/proc/self/fd") if fd not in before]
        inheritable = [
            fd for fd in opened if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(int(fd))
        ]
        assert not inheritable
    assert set(os.listdir("/proc/self/fd")) <= before
