"""A timeline of a run in Chrome's trace format, for Perfetto (ui.perfetto.dev) or chrome://tracing.

Spans lie on named tracks. Those of synchronous work (``span``, a context manager) nest, and share one lane.
Those of asynchronous work (``add``, with both ends known) may overlap, which one lane cannot show: each goes
to the first lane of its track that is free at its start.

The file has the format's *array* form and is written through a small buffer as the run goes. Closing makes it valid
JSON; if the process is killed before that, both viewers still open what was written, because they do not need the
closing bracket.

Times are nanoseconds of CLOCK_MONOTONIC, which ``time.monotonic_ns`` and the native engine's
``steady_clock`` both read. Work on an accelerator (``follow``) lies between two events that its stream
reaches: it is written once both have completed, which nothing waits for. Any thread may record: one lock
guards the buffer.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tierstore._native import Activity, Engine
from tierstore.accelerator import DeviceClock, has_own_memory
from tierstore.errors import naming
from tierstore.outputs import OutputKind, check_output

if TYPE_CHECKING:
    import torch

#: Nanoseconds of CLOCK_MONOTONIC, or an event of the followed device.
Moment: TypeAlias = "int | torch.Event"
Args = Mapping[str, str | int | float | bool | None]

_BUFFER_BYTES = 1 << 18
_NOTHING = nullcontext()
_LANES = 1000  # lane numbers of a track; the track's number times this is its first


class Track(Enum):
    """The tracks, in the order in which the viewer shows them."""

    COMPUTE = "compute"
    STALLS = "stalls"
    GATHERS = "gathers"
    REDUCTIONS = "reduce-scatters"
    EXCHANGES = "all-to-alls"
    DEVICE_COPIES = "device copies"
    RING = "ring memory"
    DISK_READS = "disk reads"
    DISK_WRITES = "disk writes"
    OPTIMIZER = "optimizer"
    COMMITS = "commits"


_TRACKS = {
    Activity.READ: Track.DISK_READS,
    Activity.WRITE: Track.DISK_WRITES,
    Activity.SYNC: Track.DISK_WRITES,
    Activity.PUNCH: Track.DISK_WRITES,
    Activity.COPY: Track.DEVICE_COPIES,
}


class TimelineSink(AbstractContextManager["TimelineSink"]):
    """The interface that components record to. It is a Timeline, or a NullTimeline if none is requested; it closes on exit.

    This class records nothing, at the cost of a call.
    """

    #: Whether anything is recorded; lets a caller skip gathering what only a timeline would show.
    enabled = False
    #: Why the file ends early, if it does; closing raises it.
    failure: OSError | None = None

    def follow(self, device: torch.device) -> None:
        """From now on, ``now`` and spans of computation tell when ``device`` does the work, not when it is queued. Does
        nothing for the CPU.
        """

    def now(self, stream: torch.Stream | None = None) -> Moment:
        """A time for ``add``: now, or on a followed device when ``stream`` (None: the current one) has done its work."""
        return 0

    def span(self, track: Track, name: str, args: Args | None = None) -> AbstractContextManager[None]:
        """Record the time inside the context, also when it raises. Spans of one track must nest."""
        return _NOTHING

    def add(self, track: Track, name: str, start: Moment, end: Moment, args: Args | None = None) -> None:
        """Record work that has ended, or been queued on the followed device. It may overlap other work of its track."""

    def count(self, name: str, values: Mapping[str, int | float]) -> None:
        """Record values as of now; each name is drawn as a curve, its values stacked."""

    def close(self) -> None:
        """Finish the file. Nothing may be recorded afterwards; closing again does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NullTimeline(TimelineSink):
    """Records nothing."""


class Timeline(TimelineSink):
    """Writes the trace to ``path``, replacing an earlier one. A context manager that also closes on exceptions.

    If an exception leaves the context before anything was recorded, the file stays as it was, or absent. Raises as
    ``check_output`` does, and OSError, naming ``path``, if the file cannot be opened. A failed write does not fail the work
    that is recorded: recording stops (``failure``), and closing raises the error.
    """

    enabled = True

    def __init__(self, path: Path, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._path = path = check_output(path, OutputKind.TIMELINE)
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._made = not path.exists()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._replaced = not stat.S_ISREG(os.fstat(self._fd).st_mode)  # a device has no length
        self._recorded = False
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._separator = b"[\n"
        self._pid = os.getpid()
        self._lane_ends: dict[Track, list[int]] = {track: [] for track in Track}
        self._named: set[int] = set()
        self._first = {track: (index + 1) * _LANES for index, track in enumerate(Track)}
        self._device: DeviceClock | None = None
        #: Work on the device that has yet to be written, in the order in which it was recorded.
        self._queued: deque[_Work] = deque()
        with self._lock:
            self._event({"ph": "M", "name": "process_name", "args": {"name": "tierstore"}})

    def span(self, track: Track, name: str, args: Args | None = None) -> AbstractContextManager[None]:
        return _Span(self, track, name, args)

    def follow(self, device: torch.device) -> None:
        self._device = DeviceClock(device) if has_own_memory(device) else None

    def now(self, stream: torch.Stream | None = None) -> Moment:
        return self._clock() if self._device is None else self._device.mark(stream)

    def add(self, track: Track, name: str, start: Moment, end: Moment, args: Args | None = None) -> None:
        if isinstance(start, int) and isinstance(end, int) and end < start:
            raise ValueError(f"{name} ends {start - end} ns before it starts")
        with self._lock:
            self._record(_Work(track, name, start, end, args))

    def _record(self, work: _Work) -> None:
        if isinstance(work.start, int) and isinstance(work.end, int):
            self._draw(work, work.start, work.end)
        else:
            self._queued.append(work)
            self._draw_done()

    def _draw_done(self) -> None:
        """Draw the work that the device has done, up to the first that it has not."""
        while self._queued and _done(self._queued[0].start) and _done(self._queued[0].end):
            work = self._queued.popleft()
            start_ns, end_ns = self._at_ns(work.start), self._at_ns(work.end)
            self._draw(work, start_ns, max(start_ns, end_ns))

    def _at_ns(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._device is not None
        return self._device.time_ns(moment)

    def _draw(self, work: _Work, start_ns: int, end_ns: int) -> None:
        lane = -1
        if not work.nests:
            ends = self._lane_ends[work.track]
            lane = next((lane for lane, end in enumerate(ends) if end <= start_ns), len(ends))
            # If all lanes of the numbering are taken, the last one is shared: an untidy picture, not a failure.
            lane = min(lane, _LANES - 2)
            if lane == len(ends):
                ends.append(end_ns)
            ends[lane] = end_ns
        self._slice(work.track, lane + 1, work.name, start_ns, end_ns, work.args)

    def count(self, name: str, values: Mapping[str, int | float]) -> None:
        now = self._clock()
        with self._lock:
            self._event({"ph": "C", "name": name, "ts": now / 1e3, "args": dict(values)})

    def close(self) -> None:
        with self._lock:
            if self._fd < 0:
                return
            try:
                self._draw_done()
                self._buffer.append(b"\n]\n")
                self._flush()
            finally:
                fd, self._fd = self._fd, -1
                os.close(fd)
        if self.failure is not None:
            raise self.failure

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._recorded:
            self._discard()
        with nullcontext() if error is None else suppress(OSError):
            self.close()

    def _discard(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)
                if self._made:
                    self._path.unlink(missing_ok=True)

    def _slice(
        self, track: Track, lane: int, name: str, start_ns: int, end_ns: int, args: Args | None
    ) -> None:
        tid = self._first[track] + lane
        if tid not in self._named:
            self._named.add(tid)
            title = track.value if lane < 2 else f"{track.value} {lane}"
            self._event({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": title}})
            self._event({"ph": "M", "name": "thread_sort_index", "tid": tid, "args": {"sort_index": tid}})
        duration = (end_ns - start_ns) / 1e3
        event: dict[str, object] = {
            "ph": "X",
            "name": name,
            "tid": tid,
            "ts": start_ns / 1e3,
            "dur": duration,
        }
        if args:
            event["args"] = dict(args)
        self._event(event)

    def _event(self, event: dict[str, object]) -> None:
        if self._fd < 0:
            raise ValueError(f"{self._path}: the timeline is closed")
        if self.failure is not None:
            return
        self._recorded = self._recorded or event["ph"] != "M"
        event["pid"] = self._pid
        text = self._separator + json.dumps(event, separators=(",", ":")).encode()
        self._separator = b",\n"
        self._buffer.append(text)
        self._buffered += len(text)
        if self._buffered >= _BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        # An unbuffered descriptor, not a file object: no write error is left to a destructor.
        data = memoryview(b"".join(self._buffer))
        self._buffer.clear()
        self._buffered = 0
        try:
            with naming(self._path):
                if not self._replaced:
                    os.ftruncate(self._fd, 0)
                    self._replaced = True
                while data:
                    data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.failure = self.failure or error


class _Work(NamedTuple):
    """What is drawn. ``nests``: in the track's first lane, with the other spans of synchronous work."""

    track: Track
    name: str
    start: Moment
    end: Moment
    args: Args | None
    nests: bool = False


def _done(moment: Moment) -> bool:
    return isinstance(moment, int) or moment.query()


class _Span:
    __slots__ = ("_args", "_name", "_now", "_start", "_timeline", "_track")

    def __init__(self, timeline: Timeline, track: Track, name: str, args: Args | None) -> None:
        self._timeline = timeline
        self._track = track
        self._name = name
        self._args = args
        self._now = timeline.now if track is Track.COMPUTE else timeline._clock
        self._start: Moment = 0

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *raised: object) -> None:
        work = _Work(self._track, self._name, self._start, self._now(), self._args, nests=True)
        with self._timeline._lock:
            self._timeline._record(work)


class OperationSpans:
    """Draws the operations of the ticket engine: ``engine`` records when they ran, and ``drain`` (say, after each step) puts
    them on their tracks. Turns on a limited link are drawn too, marked "(link)". Operations without an activity are drawn by
    the code that queued them.

    At most ``CAPACITY`` operations between two drains are kept; further ones are counted, not drawn.
    """

    CAPACITY = 1 << 16

    def __init__(self, engine: Engine, sink: TimelineSink) -> None:
        self._engine = engine
        self._sink = sink
        if sink.enabled:
            engine.record_spans(self.CAPACITY)

    def drain(self) -> None:
        """Draw what ended since the last call."""
        if not self._sink.enabled:
            return
        spans, lost = self._engine.drain_spans()
        for activity, held, ticket, start_ns, end_ns, nbytes in spans:
            if activity is Activity.OTHER:
                continue
            name = activity.name.lower().replace("_", " ") + (" (link)" if held else "")
            args = {"ticket": ticket, "nbytes": nbytes}
            self._sink.add(_TRACKS.get(activity, Track.OPTIMIZER), name, start_ns, end_ns, args)
        if lost:
            self._sink.count("operations not drawn", {"operations": lost})


def open_timeline(path: Path | None) -> Timeline | NullTimeline:
    """A Timeline at ``path``, or a NullTimeline for None. Raises OSError."""
    return NullTimeline() if path is None else Timeline(path)


# Reading ----------------------------------------------------------------------------------------------------


class TimelineSlice(NamedTuple):
    """A span from ``begin`` to ``end``, in microseconds of CLOCK_MONOTONIC."""

    name: str
    begin: float
    end: float


def read_slices(timeline: Path) -> dict[str, list[TimelineSlice]]:
    """The slices of the closed ``timeline``, by track. Raises OSError."""
    return slices_by_track(json.loads(timeline.read_text()))


def slices_by_track(events: Sequence[Mapping[str, Any]]) -> dict[str, list[TimelineSlice]]:
    """The slices among ``events``, by track and in the order in which they were written."""
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict[str, list[TimelineSlice]] = {}
    for event in events:
        if event["ph"] == "X":
            # "disk reads 2" is the second lane of "disk reads".
            track = names[event["tid"]].rstrip("0123456789").rstrip()
            found = TimelineSlice(event["name"], event["ts"], event["ts"] + event["dur"])
            slices.setdefault(track, []).append(found)
    return slices
