"""A store under full load for minutes, killed at random moments, with every byte that it reads checked (docs/BENCH.md).

This process holds the model of what the store must contain; another one (``soak_worker``) works on the store and is
killed with SIGKILL. Both follow the same plan, so this one does not rely on what the store says: it advances its model
when commits are announced (``begin``) and acknowledged (``done``), and sends the next life the possible states of the
store: the last acknowledged commit, or the one that had begun.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tierstore.bench.documents import Better, Measurement, counted, derived, measured
from tierstore.bench.harness import (
    FigureTable,
    Found,
    Progress,
    refuse_existing,
    text_of,
)
from tierstore.bench.probes import trend_of
from tierstore.bench.processes import close_input, how_ended, send, start_module
from tierstore.bench.processes import end as end_process
from tierstore.bench.soak_plan import OperationKind, SoakPlan, SoakShape, StoreModel
from tierstore.machine import require_space
from tierstore.store.disk.store_extents import extent_bytes, scratch_bytes
from tierstore.store.index.database import index_bytes
from tierstore.units import format_bytes

_STEADY_LEAST_S = 60.0  # shorter soaks may be killed at any time
_JUDGED_SPAN_S = 10.0
_MEMORY_TOLERANCE_BYTES = 4 << 20
_DISK_TOLERANCE_RATIO = 0.01
_PATIENCE_S = 300.0
_EARLY_KILLS_RATIO = 0.25
_REPORT_S = 1.0


def stored_bytes(shape: SoakShape) -> int:
    """Disk bytes of a soak of ``shape``."""
    records = shape.records // 2
    extents = sum(
        extent_bytes(schema, records, shape.retain) + scratch_bytes(schema, records)
        for schema in shape.schemas
    )
    return extents + index_bytes(shape.records, shape.retain)


class MessageReader:
    """Messages of a worker as they arrive; a message cut off by its death is dropped."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._descriptor = process.stdout.fileno()
        self._buffer = b""

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next message, ``{"say": "ended"}`` after the last; None if none arrives in time."""
        while b"\n" not in self._buffer:
            if not select.select([self._descriptor], [], [], max(timeout_s, 0.0))[0]:
                return None
            data = os.read(self._descriptor, 1 << 16)
            if not data:
                return {"say": "ended"}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Soak:
    """A soak of ``seconds``, with a kill every ``kill_every_s`` on average (0: never).

    The store of ``shape`` is spread over ``directory`` and the directories ``further``. ``between_lives``, if given, is
    called with the number of each life that was killed, while no process has the store open.
    """

    def __init__(
        self,
        directory: Path,
        shape: SoakShape,
        seconds: float,
        *,
        further: Sequence[Path] = (),
        kill_every_s: float = 10.0,
        between_lives: Callable[[int], None] = lambda life: None,
    ) -> None:
        self._directories, self._shape, self._seconds = (directory, *further), shape, seconds
        self._kill_every_s, self._between_lives = kill_every_s, between_lives
        self._plan = SoakPlan(shape)
        self._random = random.Random(shape.seed)
        empty = StoreModel(shape.seed, [0] * shape.records, shape.retain)
        #: The next position, and the model there, of the last acknowledged commit and of the one that has begun.
        self._acknowledged = (0, empty)
        self._begun: tuple[int, StoreModel] | None = None
        self._counts: Counter[str] = Counter()
        self._life_counts: dict[str, int] = {}
        #: The resources of each life, sample by sample, with the time of the sample.
        self._lives: list[list[tuple[float, dict[str, int]]]] = []
        self._opens_s: list[float] = []
        self._commits_s: list[float] = []
        self._kills = self._later = 0
        self._failures: list[str] = []
        self._wrong_bytes = 0
        self._interrupted = False
        self._start_s: float | None = None
        self._next_report_s = 0.0

    @property
    def _elapsed_s(self) -> float:
        """Seconds since the store was first open."""
        return 0.0 if self._start_s is None else time.monotonic() - self._start_s

    def run(self, progress: Progress) -> Found:
        """Run the soak. ``progress`` is updated about every second, and an interrupt ends the soak early.

        The store is removed afterwards unless something failed. Raises ConfigError (a directory exists), OSError.
        """
        for directory in self._directories:
            refuse_existing(directory)
        require_space(self._directories, stored_bytes(self._shape), "the records of the soak")
        self._progress, life, killed = progress, 0, True
        with progress.interruptible() as self._stop_requested:
            # A kill is never the end: the next life examines what it left.
            while killed or (
                self._elapsed_s < self._seconds and not self._failures and not self._interrupted
            ):
                killed = self._live(life)
                if killed:
                    self._between_lives(life)
                life += 1
        figures = self._result(life)
        failed = bool(figures["failures"])
        if not failed:
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)
        measurements = list(_measurements(figures))
        return Found(figures=figures, measurements=measurements, shown=list(_shown(figures)), failed=failed)

    # One life -----------------------------------------------------------------------------------------------

    def _live(self, life: int) -> bool:
        """Run a life until it is killed (True), has ended by itself, or the time is over."""
        # This process handles an interrupt from the terminal: it stops the worker.
        process = start_module("tierstore.bench.soak_worker", new_session=True)
        self._lives.append([])
        self._life_counts = {}
        kills = self._kill_every_s > 0
        early = kills and self._random.random() < _EARLY_KILLS_RATIO
        typical_start_s = 1.0 + (2 * median(self._opens_s) if self._opens_s else 0.0)
        kill_at = self._next_kill(self._random.random() * typical_start_s) if early else math.inf
        reader = MessageReader(process)
        heard = time.monotonic()
        try:
            send(process, self._request(life))
            while True:
                if self._stop_requested():
                    self._interrupted = True
                    return self._stop(process, reader)
                now = time.monotonic()
                end = now + self._seconds - self._elapsed_s
                if now >= min(end, kill_at):
                    if kill_at >= end:
                        return self._stop(process, reader)
                    process.kill()
                    self._kills += 1
                    self._drain(reader, math.inf)
                    return True
                message = reader.next(min(kill_at, end, now + _REPORT_S) - now)
                if message is None:
                    if now - heard > _PATIENCE_S:
                        self._fail("Hang", f"no message from the worker for {_PATIENCE_S:g} s")
                        return False
                    continue
                heard = time.monotonic()
                if message["say"] == "ended":
                    return self._ended(process)
                self._receive(message)
                if message["say"] == "opened" and math.isinf(kill_at) and kills:
                    kill_at = self._next_kill(self._random.expovariate(1 / self._kill_every_s))
        finally:
            process.kill()
            end_process(process)
            self._counts.update(self._life_counts)

    def _next_kill(self, delay_s: float) -> float:
        """When (monotonic clock) to kill a process due after ``delay_s``: not in the middle third of a long soak."""
        begun, seconds = time.monotonic() - self._elapsed_s, self._seconds
        at = time.monotonic() + delay_s
        steady = seconds >= _STEADY_LEAST_S and seconds / 3 <= at - begun < seconds * 2 / 3
        return begun + seconds * 2 / 3 if steady else at

    def _request(self, life: int) -> Mapping[str, object]:
        hypotheses = [self._acknowledged] + ([self._begun] if self._begun else [])
        return {
            "directories": [str(path) for path in self._directories],
            "shape": asdict(self._shape),
            "life": life,
            "hypotheses": [{"position": p, "model": asdict(m)} for p, m in hypotheses],
        }

    def _stop(self, process: subprocess.Popen[bytes], reader: MessageReader) -> bool:
        """Let the last life read everything once more and close the store."""
        close_input(process)
        if self._drain(reader, _PATIENCE_S):
            return self._ended(process)
        self._fail("Hang", f"the worker did not end within {_PATIENCE_S:g} s after its pipe was closed")
        return False

    def _drain(self, reader: MessageReader, patience_s: float) -> bool:
        """Receive what the worker still says; returns whether it ended in time."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            message = reader.next(_REPORT_S)
            if message is not None and message["say"] == "ended":
                return True
            if message is not None:
                self._receive(message)
        return False

    def _ended(self, process: subprocess.Popen[bytes]) -> bool:
        if process.wait() and not self._failures:
            self._fail("Died", f"the worker {how_ended(process)} by itself")
        return False

    def _fail(self, error: str, text: str, wrong: int = 0) -> None:
        if not self._failures:
            self._failures, self._wrong_bytes = [f"{error}: {text}"], wrong

    # Its messages -------------------------------------------------------------------------------------------

    def _receive(self, message: Mapping[str, Any]) -> None:
        match message["say"]:
            case "sample":
                self._sample(message)
            case "begin":
                position = int(message["position"])
                model = deepcopy(self._acknowledged[1])
                self._follow(model, self._acknowledged[0], position)
                self._begun = (position + 1, model)
            case "done":
                assert self._begun is not None
                assert self._begun[0] == int(message["position"]) + 1
                self._acknowledged, self._begun = self._begun, None
                if "commit_s" in message:
                    self._commits_s.append(float(message["commit_s"]))
            case "opened":
                self._opened(message)
            case "failure":
                self._fail(message["error"], message["text"], int(message["wrong_bytes"]))

    def _follow(self, model: StoreModel, begin: int, position: int) -> None:
        """Advance ``model`` from operation ``begin`` to after the operation ``position`` (-1: the registration)."""
        if position < 0:
            model.commit()
        for done in range(begin, position + 1):
            self._plan.apply(model, done)

    def _opened(self, message: Mapping[str, Any]) -> None:
        """The commit at which the store was opened counts as acknowledged from now on."""
        if self._begun is not None and int(message["position"]) == self._begun[0] and not message["created"]:
            self._acknowledged = self._begun
            self._later += 1
        self._begun = None
        if self._start_s is None:
            self._start_s = time.monotonic()
        if not message["created"]:
            self._opens_s.append(float(message["open_s"]))

    def _sample(self, message: Mapping[str, Any]) -> None:
        now, held = self._elapsed_s, message["held"]
        self._life_counts = message["counts"]
        if held:
            self._lives[-1].append((now, held))
        if time.monotonic() >= self._next_report_s:
            self._next_report_s = time.monotonic() + _REPORT_S
            counts = self._counts + Counter(self._life_counts)
            done = {name: format_bytes(counts[f"{name}_bytes"]) for name in ("read", "written", "verified")}
            total = max(round(self._seconds), 1)
            self._progress.update(min(round(now), total), total, {**done, "kills": self._kills})

    # The end ------------------------------------------------------------------------------------------------

    def _result(self, lives: int) -> dict[str, Any]:
        shape, counts = self._shape, self._counts
        refused = {n.removeprefix("refused: "): c for n, c in counts.items() if n.startswith("refused")}
        trends = self._trends()
        failures = list(self._failures)
        if not (failures or self._interrupted or counts["fetch"]):
            failures.append("nothing was fetched in this time; choose a longer one")
        failures += [f"{name} grows" for name, trend in trends.items() if trend["grows"]]
        return {
            "bench": "soak",
            "elapsed_s": self._elapsed_s,
            "interrupted": self._interrupted,
            "seed": shape.seed,
            "record_bytes": shape.record_bytes,
            "host_budget_bytes": shape.budget,
            "retained_snapshots_count": shape.retain,
            "stored_bytes": stored_bytes(shape),
            "directories": self._directories,
            "records": shape.records,
            "operations": {f"{kind.value}_count": counts[kind.value] for kind in OperationKind},
            **{
                f"{name}_bytes": counts[f"{name}_bytes"]
                for name in ("read", "written", "verified", "audited")
            },
            "wrong_bytes": self._wrong_bytes,
            "lives_count": lives,
            "kills_count": self._kills,
            "commits_found_unacknowledged_count": self._later,
            "reopen": _durations(self._opens_s),
            "commit": _durations(self._commits_s),
            "faults": [
                {"fault": what, "error": error, "times_count": count}
                for text, count in sorted(refused.items())
                for what, error in [text.rsplit(": ", 1)]
            ],
            "trends": trends,
            "failures": failures,
        }

    def _trends(self) -> dict[str, dict[str, Any]]:
        """Trends of memory and descriptors in the longest life, and of disk over all lives."""
        samples = [sample for life in self._lives for sample in life]
        if not samples:
            return {}
        longest = max(filter(None, self._lives), key=lambda life: life[-1][0] - life[0][0])
        most_disk = max(held["disk_bytes"] for _, held in samples)

        def trend(
            of: list[tuple[float, dict[str, int]]], name: str, unit: str, tolerance: float
        ) -> dict[str, Any]:
            times, values = [time for time, _ in of], [float(held[name]) for _, held in of]
            return trend_of(times, values, unit, tolerance=tolerance, least_span_s=_JUDGED_SPAN_S)

        return {
            "resident memory": trend(longest, "resident_bytes", "bytes", _MEMORY_TOLERANCE_BYTES),
            "descriptors": trend(longest, "descriptors", "count", 0.5),
            "disk": trend(samples, "disk_bytes", "bytes", most_disk * _DISK_TOLERANCE_RATIO),
        }


def _durations(seconds: Sequence[float]) -> dict[str, Any]:
    found = {"median_s": median(seconds), "greatest_s": max(seconds)} if seconds else {}
    return {"times_count": len(seconds), **found}


def _measurements(figures: Mapping[str, Any]) -> Iterator[Measurement]:
    yield counted("wrong bytes", figures["wrong_bytes"], "bytes", Better.LOWER)
    # The amount of work done in the time varies.
    yield measured("kills", figures["kills_count"], "kills")
    for name in ("read", "written", "verified"):
        yield measured(name, figures[f"{name}_bytes"], "bytes")
    for name in ("reopen", "commit"):
        if "median_s" in figures[name]:
            yield measured(f"{name}, median", figures[name]["median_s"], "s")
    for name, trend in figures["trends"].items():
        unit = trend["unit"]
        yield derived(f"{name}, growth a second", trend[f"slope_{unit}_per_s"], unit, Better.LOWER)


def _shown(figures: Mapping[str, Any]) -> Iterator[FigureTable | str]:
    if figures["interrupted"]:
        yield "interrupted; the results up to then follow"
    operations = [f"{count} {name.removesuffix('_count')}" for name, count in figures["operations"].items()]
    yield f"{figures['records']} records, {format_bytes(figures['stored_bytes'])} of disk: {', '.join(operations)}"
    rows = {
        "read": "read_bytes",
        "written": "written_bytes",
        "verified": "verified_bytes",
        "of these from the files of closed stores": "audited_bytes",
        "wrong bytes": "wrong_bytes",
        "kills": "kills_count",
        "reopened at a commit not acknowledged yet": "commits_found_unacknowledged_count",
        "reopening, median": "reopen.median_s",
        "reopening, longest": "reopen.greatest_s",
    }
    yield FigureTable.transposed("", rows, {"found": figures})
    for name, trend in figures["trends"].items():
        values = [text_of(key, trend[key]) for key in trend if key.startswith(("first", "middle", "last"))]
        verdict = "GROWS" if trend["grows"] else "flat" if trend["judged"] else "too short to judge"
        yield f"{name} at start, middle, end: {', '.join(values)} ({verdict})"
    if figures["faults"]:
        columns = {"fault": "fault", "surfaced as": "error", "times": "times_count"}
        yield FigureTable("", columns, figures["faults"])
    for failure in figures["failures"]:
        yield f"FAILED: {failure}"
