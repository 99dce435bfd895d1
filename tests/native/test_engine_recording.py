"""The event log: what is in it, and what its order promises."""

from pathlib import Path

import pytest
from crash_states import Event
from engines import Events, MakeEngine, frame

from tierstore import _native as native


def test_the_log_of_a_commit(
    make_engine: MakeEngine, arena: native.Arena, file: native.File, tmp_path: Path, events: Events
) -> None:
    engine = make_engine(log_path=tmp_path / "log")
    arena.view()[:] = 7
    write = engine.write(file, 4096, [frame(arena, 0, 100), frame(arena, 5, 100)])
    engine.wait(engine.read(file, 4096, [frame(arena, 9, 100)], after=[write]))
    sync = engine.sync(file, after=[write])
    engine.wait(sync)
    engine.log_mark("commit 1 acknowledged")
    engine.close()
    block = b"\x07" * 100 + bytes(3996)
    assert [(e.event.name, e.ticket, e.offset, e.text, e.data) for e in events()] == [
        ("WRITE_SUBMIT", write, 4096, file.path, block * 2),
        ("WRITE_DONE", write, 0, "", b""),
        ("SYNC_SUBMIT", sync, 0, file.path, b""),
        ("SYNC_DONE", sync, 0, "", b""),
        ("MARK", 0, 0, "commit 1 acknowledged", b""),
    ]


def test_replaying_the_log_rebuilds_the_file(
    make_engine: MakeEngine, arena: native.Arena, file: native.File, tmp_path: Path, events: Events
) -> None:
    engine = make_engine(log_path=tmp_path / "log")
    tickets: list[int] = []
    for i in range(100):
        frame(arena, i, 100).array()[:] = i
        tickets.append(engine.write(file, 4096 * (i * 7 % 40), [frame(arena, i, 100)], after=tickets[-1:]))
    engine.wait_all(tickets)
    engine.close()
    image = bytearray(file.size)
    submitted, done = [], []
    for entry in events():
        if entry.event is Event.WRITE_SUBMIT:
            submitted.append(entry.ticket)
            image[entry.offset : entry.offset + len(entry.data)] = entry.data
        else:
            assert entry.ticket == submitted[-1], "each write followed the one before"
            done.append(entry.ticket)
    assert submitted == done == tickets
    assert bytes(image) == Path(file.path).read_bytes()


def test_a_failure_is_recorded_as_one(
    make_engine: MakeEngine, arena: native.Arena, tmp_path: Path, events: Events
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    engine = make_engine(log_path=tmp_path / "log")
    with native.File("/dev/full", direct=native.DirectIo.OFF) as full:
        with pytest.raises(OSError, match="/dev/full"):
            engine.wait(engine.write(full, 0, [frame(arena, 0, 100)]))
        with pytest.raises(OSError, match="/dev/full"):
            engine.wait(engine.sync(full))
    engine.close()
    submitted, done = events()
    assert (submitted.event, done.event) == (Event.WRITE_SUBMIT, Event.WRITE_DONE), (
        "no sync after a failed write"
    )
    assert "/dev/full" in done.text


def test_an_unwritable_log_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        native.Engine(log_path=tmp_path / "missing" / "log")
    assert error.value.filename == str(tmp_path / "missing" / "log")
