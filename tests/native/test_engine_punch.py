"""Holes: space goes back to the file system, in its turn, and a failure is nobody else's."""

import errno
import fcntl
import os
import struct
from pathlib import Path

import pytest
from crash_states import Event
from engines import Events, MakeEngine, frame

from tierstore import _native as native

PAGE = 4096


def allocated(path: str) -> int:
    return os.stat(path).st_blocks * 512


def test_a_hole_reads_as_zeros_and_holds_no_blocks(
    engine: native.Engine, arena: native.Arena, file: native.File
) -> None:
    arena.view()[:] = 9
    written = [engine.write(file, PAGE * i, [frame(arena, 0)]) for i in range(256)]
    engine.wait(engine.sync(file, after=written))
    before = allocated(file.path)
    engine.wait(engine.punch(file, 64 * PAGE, 128 * PAGE))
    engine.wait(engine.sync(file))
    assert allocated(file.path) <= before - 128 * PAGE
    assert file.size == 1 << 20, "the size stays"
    engine.wait_all(
        [engine.read(file, PAGE * at, [frame(arena, 1 + i)]) for i, at in enumerate((63, 64, 191, 192))]
    )
    assert [int(frame(arena, 1 + i).array()[17]) for i in range(4)] == [9, 0, 0, 9]


def test_a_hole_is_made_in_its_turn(
    make_engine: MakeEngine, arena: native.Arena, file: native.File, tmp_path: Path, events: Events
) -> None:
    """Write, hole, write: the last one stands, and the log has them in this order."""
    engine = make_engine(log_path=tmp_path / "log")
    arena.view()[:] = 5
    gate = engine.external()
    first = engine.write(file, 0, [frame(arena, 0)], after=[gate])
    hole = engine.punch(file, 0, 2 * PAGE, after=[first])
    last = engine.write(file, 0, [frame(arena, 1)], after=[hole])
    assert not engine.done(hole)
    engine.complete_external(gate)
    engine.wait(engine.read(file, 0, [frame(arena, 2)], after=[last]))
    assert frame(arena, 2).array().tobytes() == b"\x05" * PAGE
    engine.close()
    kinds = [(entry.event.name, entry.ticket) for entry in events()]
    assert kinds == [
        (f"{kind}_{when}", ticket)
        for kind, ticket in (("WRITE", first), ("PUNCH", hole), ("WRITE", last))
        for when in ("SUBMIT", "DONE")
    ]
    punch = next(entry for entry in events() if entry.event is Event.PUNCH_SUBMIT)
    assert (punch.offset, punch.text, punch.data) == (0, file.path, struct.pack("<Q", 2 * PAGE))


def test_a_hole_that_is_refused_poisons_nothing(engine: native.Engine, arena: native.Arena) -> None:
    """A sealed file lets nobody punch it."""
    fd = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.truncate(fd, 1 << 16)
        sealed = native.File(f"/proc/self/fd/{fd}", direct=native.DirectIo.OFF)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with pytest.raises(OSError, match="punching a hole") as refused:
            engine.wait(engine.punch(sealed, 0, PAGE))
        assert refused.value.errno == errno.EPERM
        assert refused.value.filename == f"/proc/self/fd/{fd}"
        assert engine.poisoned is None
        engine.wait(engine.sync(sealed))
    finally:
        os.close(fd)


def test_a_hole_of_nothing_is_refused_at_once(engine: native.Engine, file: native.File) -> None:
    with pytest.raises(ValueError, match="hole of no bytes"):
        engine.punch(file, 0, 0)
