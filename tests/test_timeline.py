"""tierstore.timeline: the file is valid JSON in Chrome's trace format, whatever happened."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Activity, Arena, Buffer, Engine, File, FileCreate, HugePages, Link
from tierstore.accelerator import DeviceClock
from tierstore.errors import ConfigError
from tierstore.timeline import (
    NullTimeline,
    OperationSpans,
    Timeline,
    TimelineSink,
    Track,
    open_timeline,
    read_slices,
)


def events(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == phase]


def test_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    clock = iter([1000, 2000, 2500, 9000])
    with Timeline(path, clock=lambda: next(clock)) as timeline:
        with timeline.span(Track.COMPUTE, "forward", {"layer": 1}):  # 1000 .. 2000
            pass
        timeline.add(Track.DISK_READS, "expert 7", 1500, 4500, {"bytes": 4096})
        timeline.count("host cache", {"resident": 3})  # at 2500
    spans = events(path)
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("forward", 1.0, 1.0),
        ("expert 7", 1.5, 3.0),
    ]
    assert spans[0]["args"] == {"layer": 1}
    assert [(e["name"], e["ts"], e["args"]) for e in events(path, "C")] == [
        ("host cache", 2.5, {"resident": 3})
    ]
    titles = {e["tid"]: e["args"]["name"] for e in events(path, "M") if e["name"] == "thread_name"}
    assert [titles[span["tid"]] for span in spans] == ["compute", "disk reads"]


def test_overlapping_work_goes_to_lanes_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Timeline(path) as timeline:
        for start, end in [(0, 10), (5, 15), (10, 20), (12, 13)]:
            timeline.add(Track.DISK_WRITES, "w", start, end)
    lanes = [span["tid"] for span in events(path)]
    assert lanes[0] == lanes[2]  # the third starts when the first has ended
    assert len({lanes[0], lanes[1], lanes[3]}) == 3


@settings(max_examples=share(40))
@given(spans=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), max_size=30))
def test_no_lane_shows_two_at_once(
    spans: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lanes") / "trace.json"
    with Timeline(path) as timeline:
        for start, length in spans:
            timeline.add(Track.OPTIMIZER, "step", start * 1000, (start + length) * 1000)
    found = events(path)
    assert sorted((e["ts"], e["dur"]) for e in found) == sorted((s, n) for s, n in spans)
    for tid in {event["tid"] for event in found}:
        lane = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == tid)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(lane))


def test_valid_after_an_exception(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def crash() -> None:
        with Timeline(path) as timeline, timeline.span(Track.COMPUTE, "doomed"):
            raise RuntimeError("out")

    with pytest.raises(RuntimeError, match="out"):
        crash()
    assert [event["name"] for event in events(path)] == ["doomed"]


def test_empty_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[\n{"ph":"M"},' + "\n" * 9000)
    timeline = Timeline(path)
    timeline.close()
    timeline.close()
    assert events(path) == []
    with pytest.raises(ValueError, match="closed"):
        timeline.add(Track.COMPUTE, "late", 0, 1)


@pytest.mark.parametrize("before", [None, "[\n]\n"])
def test_what_is_refused_before_it_starts_changes_nothing(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "trace.json"
    if before is not None:
        path.write_text(before)
    with pytest.raises(KeyError), Timeline(path):
        raise KeyError("refused")
    assert (path.read_text() if path.exists() else None) == before
    with pytest.raises(KeyError), Timeline(path) as timeline, timeline.span(Track.COMPUTE, "forward"):
        raise KeyError("later")
    assert len(events(path)) == 1


def test_streamed_with_a_bounded_buffer(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Timeline(path) as timeline:
        for index in range(20_000):
            timeline.add(Track.DISK_READS, f"expert {index}", index, index + 1)
        assert path.stat().st_size > 1_000_000  # on disk already, not waiting for the end
        # Killed here, the file lacks only its tail: whole events up to some point.
        written = path.read_text()
        assert json.loads(written[: written.rindex("},\n")] + "}]")
    assert len(events(path)) == 20_000


def test_threads_may_record_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Timeline(path) as timeline:
        threads = [
            threading.Thread(
                target=lambda: [timeline.add(Track.DEVICE_COPIES, "c", i, i + 1) for i in range(500)]
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events(path)) == 2000


def test_an_end_before_its_start_is_refused(tmp_path: Path) -> None:
    with Timeline(tmp_path / "t.json") as timeline, pytest.raises(ValueError, match="before it starts"):
        timeline.add(Track.COMPUTE, "x", 5, 4)


@dataclass
class Reached:
    """An event of a device: when it is reached, if it has been."""

    at_ms: float
    done: bool = True

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Reached) -> float:
        return later.at_ms - self.at_ms


def test_work_on_a_device_is_drawn_once_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's clock began at 5 ms, when the host's showed 1000 ms. The second copy is not done when the first is
    drawn, and holds back what was queued behind it; the fifth is never done.
    """
    marks = [Reached(5.0), *(Reached(5.0 + ms, ms < 3) for ms in (1, 2, 3, 7, 1.5, 2.5, 8, 9))]
    made = iter(marks)
    monkeypatch.setattr(DeviceClock, "mark", lambda clock, stream=None: next(made))
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1_000_000_000)
    path = tmp_path / "t.json"
    with Timeline(path, clock=lambda: 0) as timeline:
        timeline.follow(torch.device("cpu"))
        assert timeline.now() == 0
        timeline.follow(torch.device("meta"))
        for name in ("first", "second"):
            timeline.add(Track.DEVICE_COPIES, name, timeline.now(), timeline.now())
        with timeline.span(Track.COMPUTE, "third"), timeline.span(Track.STALLS, "the host's"):
            pass
        timeline.add(Track.DEVICE_COPIES, "fifth", timeline.now(), timeline.now())
        for mark in marks[3:5]:
            mark.done = True
    assert read_slices(path) == {
        "device copies": [("first", 1_001_000, 1_002_000), ("second", 1_003_000, 1_007_000)],
        "stalls": [("the host's", 0, 0)],
        "compute": [("third", 1_001_500, 1_002_500)],
    }


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no directory {tmp_path / 'nowhere'}"):
        Timeline(tmp_path / "nowhere" / "t.json")
    full = Timeline(Path("/dev/full"))
    with pytest.raises(OSError, match="/dev/full"):
        full.close()


def test_a_full_disk_fails_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded goes on, the first error is kept, and an error of that work itself comes before it."""
    monkeypatch.setattr("tierstore.timeline._BUFFER_BYTES", 1)

    def record(work: Exception | None) -> None:
        with Timeline(Path("/dev/full")) as full:
            for _ in range(3):
                with full.span(Track.COMPUTE, "a"):
                    pass
            assert full.failure is not None
            if work is not None:
                raise work

    with pytest.raises(OSError, match="No space left") as caught:
        record(None)
    assert caught.value.filename == "/dev/full"
    with pytest.raises(KeyError, match="of the work"):
        record(KeyError("of the work"))


def test_off_is_the_same_interface(tmp_path: Path) -> None:
    sinks: list[TimelineSink] = [open_timeline(None), open_timeline(tmp_path / "t.json")]
    assert [sink.enabled for sink in sinks] == [False, True]
    assert isinstance(sinks[0], NullTimeline)
    for sink in sinks:
        with sink.span(Track.COMPUTE, "a"), sink.span(Track.STALLS, "b"):
            sink.add(Track.COMMITS, "c", 0, 1)
            sink.count("d", {"e": 1})
        sink.close()


def test_the_engines_operations_lie_on_their_tracks(tmp_path: Path) -> None:
    """A write, a read and a copy, and a copy's turn on a limited link; fills and steps are the optimizer's."""
    path = tmp_path / "timeline.json"
    arena = Arena(8192, HugePages.OFF)
    one, two = (Buffer(arena, [(at, 4096)], 4096) for at in (0, 4096))
    with Timeline(path) as timeline, Engine() as engine:
        operations = OperationSpans(engine, timeline)
        file = File(tmp_path / "data", create=FileCreate.YES)
        file.allocate(0, 4096)
        ticket = engine.write(file, 0, [one])
        ticket = engine.read(file, 0, [one], after=[ticket])
        ticket = engine.copy(two, one, after=[ticket])
        ticket = engine.fill_zero(one, after=[ticket])
        engine.wait(engine.hold(Link(), 4096, Activity.COPY, after=[ticket]))
        engine.wait(engine.hold(Link(), 4096, Activity.OTHER))  # somebody else's to draw
        operations.drain()
        operations.drain()  # nothing more
    events = json.loads(path.read_text())
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [(tracks[e["tid"]], e["name"], e["args"]["nbytes"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("disk writes", "write", 4096),
        ("disk reads", "read", 4096),
        ("device copies", "copy", 4096),
        ("optimizer", "fill zero", 4096),
        ("device copies", "copy (link)", 4096),
    ]


def test_operations_beyond_the_ring_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OperationSpans, "CAPACITY", 1)
    path = tmp_path / "timeline.json"
    with Timeline(path) as timeline, Engine() as engine:
        operations = OperationSpans(engine, timeline)
        for _ in range(3):
            engine.wait(engine.hold(Link(), 0, Activity.READ))
        operations.drain()
    events = json.loads(path.read_text())
    assert sum(event["ph"] == "X" for event in events) == 1
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"operations": 2}]


def test_nobody_asks_the_engine_without_a_timeline() -> None:
    with Engine() as engine:
        operations = OperationSpans(engine, NullTimeline())
        engine.wait(engine.hold(Link(), 0, Activity.READ))
        operations.drain()
        assert engine.drain_spans() == ([], 0)
