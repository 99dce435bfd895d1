"""How much of gathers and expert fetches disappears behind computation, and behind each other.

Two ranks step the same stack of layers (``tierstore.bench.overlap.rig``, or the trainer) over links that are
limited such that computation, gathers and expert fetches each take a chosen time of their own. Serial, a step
would take their sum; overlapped perfectly, the longest of them. The figure is the step over the longest.

The three times: computation is measured in the same run, alone; the other two are what the run moved in a step,
by what its link carries. A first run over unlimited links says how many bytes that will be, and how long a step takes
in which nothing is waited for: computation and the program that drives it. A second ratio takes that for the computation.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from tierstore.bench.overlap import picture
from tierstore.bench.overlap.rank import Measurement, Stack
from tierstore.bench.overlap.rig import RigShape
from tierstore.bench.processes.namespaces import RankNamespace, namespaces_limited_to
from tierstore.bench.processes.spawn import start_ranks
from tierstore.bench.results.document import Better, derived, measured
from tierstore.bench.results.document import Measurement as Found
from tierstore.bench.training.worker import WorkerError
from tierstore.config import as_dict
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.train.config import TrainConfig

__all__ = [
    "Balance",
    "OverlapBench",
    "Prefetch",
    "Ranks",
    "Stack",
    "Times",
    "links_for",
    "measurements",
    "run",
]

_RANKS = 2
#: The device copies are not among the three: their link is that much faster than the disk's.
_COPY_SPEED = 4.0
#: What a step may take at most, in times of the longest of the three: all equal, and one three times the others.
_TO_LONGEST, _TO_LONGEST_OF_ALL = 1.15, 1.05


class Balance(StrEnum):
    """Which of the three takes three times as long as each of the others."""

    EQUAL = "all equal"
    COMPUTATION = "computation 3x"
    GATHERS = "gathers 3x"
    FETCHES = "expert fetches 3x"


class Prefetch(StrEnum):
    """Which queues look ahead."""

    BOTH = "both"
    HORIZONTAL = "horizontal only"
    VERTICAL = "vertical only"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class OverlapBench:
    """What to measure. ``timeline``: a file for rank 0's timeline of the balanced run with both queues; ``svg``: one for
    a picture of its last step. ``namespace_bandwidth``: bytes a second that the kernel lets each rank send (0: no limit).
    """

    place: Path = Path("tierstore-bench")
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    svg: Path | None = None
    stack: Stack = Stack.SYNTHETIC
    shape: RigShape = field(default_factory=RigShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    namespace_bandwidth: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 1:
            raise ConfigError(f"steps, warmup: expected at least 1, got {self.steps} and {self.warmup}")
        if self.svg is not None and self.stack is Stack.TRAINER:
            raise ConfigError("svg: a picture is drawn of the synthetic stack only")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that each of the three takes in a step when nothing else does."""

    computation: float
    gathers: float
    fetches: float

    @property
    def longest(self) -> float:
        return max(self.computation, self.gathers, self.fetches)

    @property
    def serial(self) -> float:
        return self.computation + self.gathers + self.fetches


def links_for(balance: Balance, computing_s: float, sent_bytes: float, disk_bytes: float) -> LinksConfig:
    """Links over which gathers and fetches take as long as ``balance`` says."""
    least = computing_s / 3 if balance is Balance.COMPUTATION else computing_s
    gathers = 3 * least if balance is Balance.GATHERS else least
    fetches = 3 * least if balance is Balance.FETCHES else least
    disk = disk_bytes / fetches
    return LinksConfig(
        gather=LinkConfig(bandwidth=round(sent_bytes / gathers)),
        disk=LinkConfig(bandwidth=round(disk)),
        copy=LinkConfig(bandwidth=round(disk_bytes / least * _COPY_SPEED)),
    )


def run(bench: OverlapBench, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measures, and returns figures ready for JSON. Raises ConfigError (``place`` exists), CapabilityError (no
    namespaces), WorkerError, OSError.
    """
    if bench.place.exists():
        raise ConfigError(f"store: {bench.place} exists; the benchmark wants a directory of its own")
    bench.place.mkdir(parents=True)
    try:
        with (
            namespaces_limited_to(bench.namespace_bandwidth, _RANKS) as namespaces,
            Ranks(namespaces) as ranks,
        ):
            return _run(bench, ranks, say)
    finally:
        shutil.rmtree(bench.place, ignore_errors=True)


def _run(bench: OverlapBench, ranks: Ranks, say: Callable[[str], None]) -> dict[str, Any]:
    asked = Measurement(
        place=bench.place / "run",
        steps=bench.steps,
        warmup=bench.warmup,
        stack=bench.stack,
        shape=bench.shape,
        train=bench.train,
    )
    timeline = bench.timeline
    if bench.svg is not None:
        picture.check()
        timeline = timeline or bench.place / "timeline.json"
    say("unlimited links")
    free = ranks.measure(asked)
    cases = [(balance, Prefetch.BOTH) for balance in Balance]
    cases += [(Balance.EQUAL, prefetch) for prefetch in Prefetch if prefetch is not Prefetch.BOTH]
    rows = []
    for balance, prefetch in cases:
        say(f"{balance}, prefetch {prefetch}")
        links = links_for(balance, free["computing_s"], free["sent_bytes"], free["disk_bytes"])
        drawn = timeline if (balance, prefetch) == (Balance.EQUAL, Prefetch.BOTH) else None
        found = ranks.measure(_limited_to(replace(asked, links=links, timeline=drawn), prefetch))
        if bench.stack is Stack.TRAINER:
            found["computing_s"] = free["computing_s"]
        rows.append(_row(balance, prefetch, links, found, free["step_s"]))
    if bench.svg is not None:
        assert timeline is not None
        picture.draw(timeline, bench.svg)
    return {
        "ranks": _RANKS,
        "stack": bench.stack.value,
        "namespace_bytes_per_s": bench.namespace_bandwidth or None,
        "unlimited_step_s": free["step_s"],
        "unlimited_computing_s": free["computing_s"],
        "sent_bytes": free["sent_bytes"],
        "collectives": free["collectives"],
        "disk_bytes": free["disk_bytes"],
        "disk_transfers": free["disk_transfers"],
        "runs": rows,
    }


def _limited_to(asked: Measurement, prefetch: Prefetch) -> Measurement:
    """The measurement with the lookahead of the other queue taken away."""
    shape, ahead = asked.shape, asked.train.prefetch
    if prefetch in (Prefetch.NONE, Prefetch.VERTICAL):
        shape, ahead = replace(shape, horizontal_depth=0), replace(ahead, gather_depth=0)
    if prefetch in (Prefetch.NONE, Prefetch.HORIZONTAL):
        shape, ahead = replace(shape, vertical_depth=0), replace(ahead, depth=0)
    return replace(asked, shape=shape, train=replace(asked.train, prefetch=ahead))


def _row(
    balance: Balance, prefetch: Prefetch, links: LinksConfig, found: dict[str, Any], unlimited_s: float
) -> dict[str, Any]:
    times = Times(
        found["computing_s"],
        found["sent_bytes"] / links.gather.bandwidth,
        found["disk_bytes"] / links.disk.bandwidth,
    )
    return {
        "balance": balance.value,
        "prefetch": prefetch.value,
        "step_s": found["step_s"],
        "step_samples_s": found["step_samples_s"],
        "computation_s": times.computation,
        "gathers_s": times.gathers,
        "fetches_s": times.fetches,
        "longest_s": times.longest,
        "serial_s": times.serial,
        "ratio": found["step_s"] / times.longest,
        "driven_ratio": found["step_s"] / max(times.longest, unlimited_s),
        "stalls": [{"cause": name, "step_stall_s": spent} for name, spent in sorted(found["stalls"].items())],
    }


def measurements(result: dict[str, Any]) -> list[Found]:
    """What ``run`` found, for a document."""
    found = []
    for row in result["runs"]:
        how = {"balance": row["balance"], "prefetch": row["prefetch"]}
        both = row["prefetch"] == Prefetch.BOTH
        target = _TO_LONGEST if row["balance"] == Balance.EQUAL else _TO_LONGEST_OF_ALL
        ratios = [step / row["longest_s"] for step in row["step_samples_s"]]
        found += [
            measured("step", row["step_samples_s"], "s", Better.LOWER, parameters=how),
            derived(
                "step to the longest",
                ratios,
                "ratio",
                Better.LOWER,
                parameters=how,
                target=target if both else None,
            ),
        ]
    return found


class Ranks:
    """The processes of the ranks; a context manager. ``namespaces``: one for each to live in, if any."""

    def __init__(self, namespaces: Sequence[RankNamespace] = ()) -> None:
        self._processes = start_ranks("tierstore.bench.overlap.rank", _RANKS, namespaces=namespaces)

    def measure(self, asked: Measurement) -> dict[str, Any]:
        """What the ranks found, of each figure that of the slower rank (a step is over when both are).

        Raises WorkerError.
        """
        for rank, process in enumerate(self._processes):
            # One timeline is enough, and one file cannot hold two.
            mine = asked if rank == 0 else replace(asked, timeline=None)
            with contextlib.suppress(BrokenPipeError):  # it died: the missing answer says so
                stdin = _pipe(process.stdin)
                stdin.write(json.dumps(as_dict(mine)).encode() + b"\n")
                stdin.flush()
        answers = [self._answer(rank) for rank in range(_RANKS)]
        steps = [max(times) for times in zip(*(answer["step_s"] for answer in answers), strict=True)]
        names = [name for name in answers[0] if name not in ("step_s", "stalls")]
        causes = sorted({cause for answer in answers for cause in answer["stalls"]})
        return {
            **{name: max(answer[name] for answer in answers) for name in names},
            "step_s": statistics.median(steps),
            "step_samples_s": steps,
            "stalls": {
                cause: max(answer["stalls"].get(cause, 0.0) for answer in answers) for cause in causes
            },
        }

    def _answer(self, rank: int) -> dict[str, Any]:
        line = _pipe(self._processes[rank].stdout).readline()
        if not line:
            raise WorkerError(f"rank {rank}: exited with status {self._processes[rank].wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"rank {rank}: {answer['error']}")
        return answer

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._processes:
            _pipe(process.stdin).close()
            if kind is not None:
                process.kill()
        for process in self._processes:
            process.wait()
            _pipe(process.stdout).close()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
