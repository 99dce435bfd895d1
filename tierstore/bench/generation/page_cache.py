"""The page cache, which would hide a disk: dropping it, and how far the kernel reads ahead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tierstore.errors import CapabilityError

_DROP = Path("/proc/sys/vm/drop_caches")


def drop_page_cache(file: Path = _DROP) -> str | None:
    """Writes out and drops the whole machine's page cache. None, or why it could not."""
    os.sync()
    try:
        file.write_text("3\n")
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def _queue(directory: Path, sys: Path) -> Path | None:
    """Where the kernel says how far it reads ahead on the disk under ``directory``."""
    number = os.stat(directory).st_dev
    entry = sys / f"dev/block/{os.major(number)}:{os.minor(number)}"
    for holder in (entry, entry.resolve().parent):  # a partition's queue is its disk's
        if (holder / "queue/read_ahead_kb").exists():
            return holder / "queue/read_ahead_kb"
    return None


def read_ahead_bytes(directory: Path, sys: Path = Path("/sys")) -> int | None:
    """What the kernel reads at most around a missing page of a mapped file in ``directory``; None where it does not say."""
    queue = _queue(directory, sys)
    return None if queue is None else int(queue.read_text()) << 10


@contextlib.contextmanager
def read_ahead_of(directory: Path, nbytes: int, sys: Path = Path("/sys")) -> Iterator[None]:
    """Sets the readahead of the disk under ``directory``, as it was again at exit. Raises CapabilityError."""
    queue = _queue(directory, sys)
    if queue is None:
        raise CapabilityError(f"read-ahead: {directory}: its disk has no such setting")
    before = queue.read_text()
    try:
        queue.write_text(f"{nbytes >> 10}\n")
    except OSError as error:
        raise CapabilityError(f"read-ahead: {queue}: {error.strerror}") from error
    try:
        yield
    finally:
        queue.write_text(before)
