"""How much of gathers and expert fetches disappears behind computation, and behind each other.

Two ranks step the same stack of layers (``tierstore.bench.overlap.stack``, or the trainer) over links that are
limited such that computation, gathers and expert fetches each take a chosen time of their own. Serial, a step
would take their sum; overlapped perfectly, the longest of them. The figure is the step over the longest.

The three times: computation is measured in the same run, alone; the other two are what the run moved in a step,
by what its link carries. A first run over unlimited links says how many bytes that will be, and how long a step takes
in which nothing is waited for: computation and the program that drives it. A second ratio takes that for the computation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.overlap import picture
from tierstore.bench.overlap.rank import RankRequest, RankSteps, Stack
from tierstore.bench.overlap.stack import StackShape
from tierstore.bench.processes.namespaces import RankNamespace, namespaces_limited_to
from tierstore.bench.processes.ranks import AskedRanks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import Figures, StallTime, named
from tierstore.config import as_dict
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.train.config import TrainConfig

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

    directory: Path = Path("tierstore-bench")
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    svg: Path | None = None
    stack: Stack = Stack.SYNTHETIC
    shape: StackShape = field(default_factory=StackShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    namespace_bandwidth: int = 0

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, warmup=self.warmup)
        if self.svg is not None and self.stack is Stack.TRAINER:
            raise ConfigError("svg: a picture is drawn of the synthetic stack only")


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


@dataclass(frozen=True, kw_only=True)
class OverlapRun(Figures):
    """Steps over one balance of links. The ratios: a step to the longest of the three, and to that or a step over
    unlimited links, if that is longer.
    """

    balance: Balance
    prefetch: Prefetch
    step_s: float
    step_samples_s: Sequence[float]
    computation_s: float
    gathers_s: float
    fetches_s: float
    longest_s: float
    serial_s: float
    longest_ratio: float = field(metadata=named("ratio"))
    unlimited_ratio: float = field(metadata=named("driven_ratio"))
    stalls: Sequence[StallTime]

    def stalled_s(self, dimension: str) -> float:
        """Along ``dimension``, for all causes."""
        return sum(stall.step_stall_s for stall in self.stalls if stall.cause.startswith(dimension))


@dataclass(frozen=True, kw_only=True)
class OverlapResult(Figures):
    """What ``run`` found. Bytes and counts are those of a step over unlimited links."""

    ranks: int = _RANKS
    stack: Stack
    namespace_bytes_per_s: int | None
    unlimited_step_s: float
    unlimited_computing_s: float
    sent_bytes: float
    collectives: float
    disk_bytes: float
    disk_transfers: float
    runs: Sequence[OverlapRun]


def run(bench: OverlapBench, say: Callable[[str], None] = lambda _: None) -> OverlapResult:
    """Measures. Raises ConfigError (``directory`` exists), CapabilityError (no namespaces), WorkerError, OSError."""
    with (
        work_directory(bench.directory),
        namespaces_limited_to(bench.namespace_bandwidth, _RANKS) as namespaces,
        RankProcesses(namespaces) as ranks,
    ):
        return _run(bench, ranks, say)


def _run(bench: OverlapBench, ranks: RankProcesses, say: Callable[[str], None]) -> OverlapResult:
    asked = RankRequest(
        directory=bench.directory / "run",
        steps=bench.steps,
        warmup=bench.warmup,
        stack=bench.stack,
        shape=bench.shape,
        train=bench.train,
    )
    timeline = bench.timeline
    if bench.svg is not None:
        timeline = timeline or bench.directory / "timeline.json"
    say("unlimited links")
    free = ranks.measure(asked)
    cases = [(balance, Prefetch.BOTH) for balance in Balance]
    cases += [(Balance.EQUAL, prefetch) for prefetch in Prefetch if prefetch is not Prefetch.BOTH]
    runs = []
    for balance, prefetch in cases:
        say(f"{balance}, prefetch {prefetch}")
        links = links_for(balance, free.computing_s, free.sent_bytes, free.disk_bytes)
        drawn = timeline if (balance, prefetch) == (Balance.EQUAL, Prefetch.BOTH) else None
        found = ranks.measure(_limited_to(replace(asked, links=links, timeline=drawn), prefetch))
        if bench.stack is Stack.TRAINER:
            found = replace(found, computing_s=free.computing_s)
        runs.append(overlap_run(balance, prefetch, links, found, free.step_s))
    if bench.svg is not None:
        assert timeline is not None
        picture.draw(timeline, bench.svg)
    return OverlapResult(
        stack=bench.stack,
        namespace_bytes_per_s=bench.namespace_bandwidth or None,
        unlimited_step_s=free.step_s,
        unlimited_computing_s=free.computing_s,
        sent_bytes=free.sent_bytes,
        collectives=free.collectives,
        disk_bytes=free.disk_bytes,
        disk_transfers=free.disk_transfers,
        runs=runs,
    )


def _limited_to(asked: RankRequest, prefetch: Prefetch) -> RankRequest:
    """The measurement with the lookahead of the other queue taken away."""
    shape, ahead = asked.shape, asked.train.prefetch
    if prefetch in (Prefetch.NONE, Prefetch.VERTICAL):
        shape, ahead = replace(shape, horizontal_depth=0), replace(ahead, gather_depth=0)
    if prefetch in (Prefetch.NONE, Prefetch.HORIZONTAL):
        shape, ahead = replace(shape, vertical_depth=0), replace(ahead, depth=0)
    return replace(asked, shape=shape, train=replace(asked.train, prefetch=ahead))


def overlap_run(
    balance: Balance, prefetch: Prefetch, links: LinksConfig, found: RankSteps, unlimited_s: float
) -> OverlapRun:
    """What ``found`` says of the overlap over ``links``; ``unlimited_s``: a step over unlimited ones."""
    gathers_s, fetches_s = found.sent_bytes / links.gather.bandwidth, found.disk_bytes / links.disk.bandwidth
    times = (found.computing_s, gathers_s, fetches_s)
    return OverlapRun(
        balance=balance,
        prefetch=prefetch,
        step_s=found.step_s,
        step_samples_s=found.step_samples_s,
        computation_s=found.computing_s,
        gathers_s=gathers_s,
        fetches_s=fetches_s,
        longest_s=max(times),
        serial_s=sum(times),
        longest_ratio=found.step_s / max(times),
        unlimited_ratio=found.step_s / max(*times, unlimited_s),
        stalls=[StallTime(cause=name, step_stall_s=spent) for name, spent in sorted(found.stalls.items())],
    )


def measurements(result: OverlapResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for one in result.runs:
        how = {"balance": one.balance.value, "prefetch": one.prefetch.value}
        target = _TO_LONGEST if one.balance is Balance.EQUAL else _TO_LONGEST_OF_ALL
        yield measured("step", one.step_samples_s, "s", Better.LOWER, parameters=how)
        yield derived(
            "step to the longest",
            [step / one.longest_s for step in one.step_samples_s],
            "ratio",
            Better.LOWER,
            parameters=how,
            target=target if one.prefetch is Prefetch.BOTH else None,
        )


class RankProcesses(AskedRanks):
    """The processes of the ranks; a context manager. ``namespaces``: one for each to live in, if any."""

    def __init__(self, namespaces: Sequence[RankNamespace] = ()) -> None:
        super().__init__("tierstore.bench.overlap.rank", _RANKS, namespaces=namespaces)

    def measure(self, asked: RankRequest) -> RankSteps:
        """What the ranks measured, each figure that of the slowest. Raises WorkerError."""
        # One timeline is enough, and one file cannot hold two.
        others = replace(asked, timeline=None)
        answers = self.ask([as_dict(asked if rank == 0 else others) for rank in range(_RANKS)])
        return RankSteps.slowest([RankSteps(**answer) for answer in answers])
