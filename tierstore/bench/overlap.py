"""How much of gathers, expert fetches and device copies is hidden behind computation, and behind each other.

Two ranks step the same stack of layers (``tierstore.bench.overlap_rank``, or the trainer) over links limited so that
computation, gathers, expert fetches from disk and copies to and from the device each take a chosen time. Serially, a step
would take their sum; overlapped perfectly, the longest of them. The figure is the step divided by the longest.

The four times: computation is measured alone in the same run; the others are what the run moved in a step, divided by the
bandwidth of its link. A first run over unlimited links measures how many bytes that is, and how long a step takes in which
nothing is waited for: computation and the program that drives it. A second ratio uses that as the computation.

Each rank (``tierstore.bench.overlap_rank``) gets any number of ``RankRequest``, the same for all, and answers each with
``RankSteps``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tierstore.bench.documents import Better, Measurement, derived, measured
from tierstore.bench.harness import (
    Benchmark,
    FigureTable,
    Found,
    Progress,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.namespaces import RankNamespace, rank_namespaces
from tierstore.bench.processes import AskedRanks
from tierstore.config import as_dict, check_least, check_positive, option
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.outputs import OutputKind, write_output
from tierstore.reports.bars import Bar, BarPanel, draw_bars, joined
from tierstore.timeline import TimelineSlice, Track, read_slices
from tierstore.train.config import TrainConfig

_RANKS = 2
#: Bytes a second of a copy link that delays nothing, but counts.
_UNLIMITED = 1 << 50
#: The most that a step may take, relative to the longest of the four: all equal, and one three times the others.
_TO_LONGEST, _TO_LONGEST_OF_ALL = 1.10, 1.05
#: Steps that are not measured after computation was measured alone: meanwhile the links have completed all requests, and
#: the first step would find all that it needs.
CAUGHT_UP = 1


class Balance(StrEnum):
    """Which of the four takes three times as long as each of the others."""

    EQUAL = "all equal"
    COMPUTATION = "computation 3x"
    GATHERS = "gathers 3x"
    FETCHES = "expert fetches 3x"
    COPIES = "device copies 3x"


class Prefetch(StrEnum):
    """Which queues look ahead."""

    BOTH = "both"
    HORIZONTAL = "horizontal only"
    VERTICAL = "vertical only"
    NONE = "none"


class Stack(StrEnum):
    """What is stepped."""

    SYNTHETIC = "synthetic"  # layers that only take time: tierstore.bench.overlap_rank
    TRAINER = "trainer"


class Computation(StrEnum):
    """What a layer's computation is."""

    MATMUL = "matmul"  # on the processor that also drives the queues
    DEVICE = "device"  # a given time on a device, during which the processor is free, as with a GPU


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """The size of a stack of layers, and how far ahead its queues look.

    ``forward_s``: computation of one forward pass; a backward pass takes twice that. Half of it is the experts'.
    ``cached_layers``: the number of layers whose experts fit in the host cache. ``experts``: per layer and rank.
    """

    layers: int = 16
    experts: int = 4
    dense_side: int = 512
    expert_side: int = 256
    cached_layers: float = 8.0
    forward_s: float = 0.02
    computation: Computation = Computation.MATMUL
    horizontal_depth: int = 2
    vertical_depth: int = 12

    @property
    def dense_numel(self) -> int:
        return self.dense_side**2

    @property
    def expert_numel(self) -> int:
        return self.expert_side**2

    @property
    def budgets(self) -> tuple[int, int]:
        """Bytes of the host cache, and how many of them speculation may hold."""
        layer = self.experts * 16 * self.expert_numel
        lookahead = int(max(self.cached_layers - 1.0, 0.0) * layer) if self.vertical_depth else 0
        return int(self.cached_layers * layer), lookahead


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """What a rank runs and measures; it makes ``directory`` and removes it. ``shape``: for the synthetic stack; ``train``:
    for the trainer.
    """

    directory: Path
    steps: int = 5
    warmup: int = 3
    timeline: Path | None = None
    stack: Stack = Stack.SYNTHETIC
    shape: StackShape = field(default_factory=StackShape)
    train: TrainConfig = field(default_factory=TrainConfig)
    links: LinksConfig = field(default_factory=LinksConfig)


@dataclass(frozen=True, kw_only=True)
class RankSteps:
    """What one rank measured: the seconds of each step, and the means per step of what it moved and how long it stalled.

    ``computing_s``: the computation of a step alone. ``copied_bytes``: over the copy link, 0 if that has no limit.
    ``stalls``: seconds by dimension and cause.
    """

    step_samples_s: Sequence[float]
    computing_s: float
    disk_bytes: float
    disk_transfers: float
    sent_bytes: float
    collectives: float
    copied_bytes: float
    stalls: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """The median."""
        return statistics.median(self.step_samples_s)

    @staticmethod
    def slowest(ranks: Sequence[RankSteps]) -> RankSteps:
        """The greatest of each figure: a step is over when all ranks have finished it."""
        means = ("computing_s", "disk_bytes", "disk_transfers", "sent_bytes", "collectives", "copied_bytes")
        causes = {cause for rank in ranks for cause in rank.stalls}
        return RankSteps(
            step_samples_s=[max(each) for each in zip(*(rank.step_samples_s for rank in ranks), strict=True)],
            stalls={cause: max(rank.stalls.get(cause, 0.0) for rank in ranks) for cause in causes},
            **{name: max(getattr(rank, name) for rank in ranks) for name in means},
        )


@dataclass(frozen=True, kw_only=True)
class OverlapBench(Benchmark):
    """Two ranks over limited links: how much of gathers, fetches and copies is hidden, and by which queue."""

    stack: Stack = option(Stack.SYNTHETIC, "Layers that only take time, or the trainer (CONFIG, --set).")
    layers: int = option(16, "Layers of the synthetic stack.")
    steps: int = option(4, "Steps measured in each run.")
    warmup: int = option(6, "Unmeasured steps before them.")
    forward_ms: float = option(40.0, "Computation time of a layer's forward pass.")
    computation: Computation = option(
        Computation.MATMUL, "On the processor, or, as on a device, while the processor is free."
    )
    store: Path = store_option()
    timeline: Path | None = option(
        None, "Write rank 0's Chrome trace of the balanced run.", path=OutputKind.TIMELINE
    )
    svg: Path | None = option(None, "Draw one of its steps.", path=OutputKind.PICTURE)
    namespace_bandwidth: int = size_option(
        "0", "Limit each rank, in a network namespace, to N bytes a second (needs root, ip and tc)."
    )
    train: TrainConfig = field(
        default_factory=TrainConfig, metadata={"configuration": (), "fixed": {"threads": 1}}
    )

    def __post_init__(self) -> None:
        check_least(self, 1, "layers", "steps", "warmup")
        check_positive(self, "forward_ms")
        if self.svg is not None and self.stack is Stack.TRAINER:
            raise ConfigError("svg: a picture is drawn of the synthetic stack only")
        if self.train.lora.enabled:
            raise ConfigError(
                "lora.rank: expected 0 in bench overlap, which counts the copies of trained experts"
            )

    @property
    def shape(self) -> StackShape:
        """The synthetic stack."""
        return StackShape(
            layers=self.layers,
            cached_layers=self.layers / 2,
            vertical_depth=max(1, self.layers * 3 // 4),
            forward_s=self.forward_ms / 1e3,
            computation=self.computation,
        )

    def run(self, progress: Progress) -> Found:
        """Measure. Raises ConfigError (``store`` exists), CapabilityError (no namespaces), WorkerError, OSError."""
        with (
            work_directory(self.store),
            rank_namespaces(_RANKS, bandwidth=self.namespace_bandwidth) as namespaces,
            RankProcesses(namespaces) as ranks,
        ):
            return _run(self, ranks, progress)


def links_for(
    balance: Balance, computing_s: float, sent_bytes: float, disk_bytes: float, copied_bytes: float
) -> LinksConfig:
    """Links over which gathers, fetches and copies take the times of ``balance``."""
    least = computing_s / 3 if balance is Balance.COMPUTATION else computing_s

    def link(nbytes: float, longest: Balance) -> LinkConfig:
        return LinkConfig(bandwidth=round(nbytes / (3 * least if balance is longest else least)))

    return LinksConfig(
        gather=link(sent_bytes, Balance.GATHERS),
        disk=link(disk_bytes, Balance.FETCHES),
        copy=link(copied_bytes, Balance.COPIES),
    )


def _run(bench: OverlapBench, ranks: RankProcesses, progress: Progress) -> Found:
    asked = RankRequest(
        directory=bench.store / "run",
        steps=bench.steps,
        warmup=bench.warmup,
        stack=bench.stack,
        shape=bench.shape,
        train=bench.train,
    )
    timeline = bench.timeline
    if bench.svg is not None:
        timeline = timeline or bench.store / "timeline.json"
    progress.say("unlimited links")
    free = ranks.measure(replace(asked, links=LinksConfig(copy=LinkConfig(bandwidth=_UNLIMITED))))
    cases = [(balance, Prefetch.BOTH) for balance in Balance]
    cases += [(Balance.EQUAL, prefetch) for prefetch in Prefetch if prefetch is not Prefetch.BOTH]
    runs = []
    for balance, prefetch in cases:
        progress.say(f"{balance}, prefetch {prefetch}")
        links = links_for(balance, free.computing_s, free.sent_bytes, free.disk_bytes, free.copied_bytes)
        drawn = timeline if (balance, prefetch) == (Balance.EQUAL, Prefetch.BOTH) else None
        found = ranks.measure(_limited_to(replace(asked, links=links, timeline=drawn), prefetch))
        if bench.stack is Stack.TRAINER:
            found = replace(found, computing_s=free.computing_s)
        runs.append(overlap_run(balance, prefetch, links, found, free.step_s))
    if bench.svg is not None:
        assert timeline is not None
        draw(timeline, bench.svg)
    figures = {
        "ranks": _RANKS,
        "stack": bench.stack,
        "namespace_bytes_per_s": bench.namespace_bandwidth or None,
        "unlimited_step_s": free.step_s,
        "unlimited_computing_s": free.computing_s,
        "sent_bytes": free.sent_bytes,
        "collectives": free.collectives,
        "disk_bytes": free.disk_bytes,
        "disk_transfers": free.disk_transfers,
        "copied_bytes": free.copied_bytes,
        "runs": runs,
    }
    columns = {
        "": "balance",
        "prefetch": "prefetch",
        "computation": "computation_s",
        "gathers": "gathers_s",
        "fetches": "fetches_s",
        "copies": "copies_s",
        "step": "step_s",
        "/ longest": "ratio",
        "/ unlimited": "driven_ratio",
        "stalled: horizontal": "horizontal_s",
        "vertical": "vertical_s",
    }
    rows = [
        {**one, **{f"{way}_s": _stalled_s(one, way) for way in ("horizontal", "vertical")}} for one in runs
    ]
    table = FigureTable(f"{_RANKS} ranks, {bench.stack.value} layers, links limited", columns, rows)
    return Found(figures=figures, measurements=list(_measurements(runs)), shown=[table])


def _stalled_s(one: Mapping[str, Any], dimension: str) -> object:
    """Seconds of a step stalled along ``dimension``, for all causes."""
    return sum(stall["step_stall_s"] for stall in one["stalls"] if stall["cause"].startswith(dimension))


def _limited_to(asked: RankRequest, prefetch: Prefetch) -> RankRequest:
    """The request without the lookahead of the other queue."""
    shape, ahead = asked.shape, asked.train.prefetch
    if prefetch in (Prefetch.NONE, Prefetch.VERTICAL):
        shape, ahead = replace(shape, horizontal_depth=0), replace(ahead, gather_depth=0)
    if prefetch in (Prefetch.NONE, Prefetch.HORIZONTAL):
        shape, ahead = replace(shape, vertical_depth=0), replace(ahead, depth=0)
    return replace(asked, shape=shape, train=replace(asked.train, prefetch=ahead))


def overlap_run(
    balance: Balance, prefetch: Prefetch, links: LinksConfig, found: RankSteps, unlimited_s: float
) -> dict[str, Any]:
    """Evaluate the overlap of ``found`` over ``links``; ``unlimited_s``: a step over unlimited ones.

    Ratios: of a step to the longest of the four, and to the longer of that and a step over unlimited links.
    """
    gathers_s, fetches_s = found.sent_bytes / links.gather.bandwidth, found.disk_bytes / links.disk.bandwidth
    copies_s = found.copied_bytes / links.copy.bandwidth
    times = (found.computing_s, gathers_s, fetches_s, copies_s)
    return {
        "balance": balance,
        "prefetch": prefetch,
        "step_s": found.step_s,
        "step_samples_s": found.step_samples_s,
        "computation_s": found.computing_s,
        "gathers_s": gathers_s,
        "fetches_s": fetches_s,
        "copies_s": copies_s,
        "longest_s": max(times),
        "serial_s": sum(times),
        "ratio": found.step_s / max(times),
        "driven_ratio": found.step_s / max(*times, unlimited_s),
        "stalls": [{"cause": name, "step_stall_s": spent} for name, spent in sorted(found.stalls.items())],
    }


def _measurements(runs: Sequence[Mapping[str, Any]]) -> Iterator[Measurement]:
    for one in runs:
        how = {"balance": one["balance"].value, "prefetch": one["prefetch"].value}
        target = _TO_LONGEST if one["balance"] is Balance.EQUAL else _TO_LONGEST_OF_ALL
        yield measured("step", one["step_samples_s"], "s", parameters=how)
        yield derived(
            "step to the longest",
            [step / one["longest_s"] for step in one["step_samples_s"]],
            "ratio",
            Better.LOWER,
            parameters=how,
            target=target if one["prefetch"] is Prefetch.BOTH else None,
        )


class RankProcesses(AskedRanks):
    """The processes of the ranks; a context manager. ``namespaces``: one for each rank, if any."""

    def __init__(self, namespaces: Sequence[RankNamespace] = ()) -> None:
        super().__init__("tierstore.bench.overlap_rank", _RANKS, namespaces=namespaces)

    def measure(self, asked: RankRequest) -> RankSteps:
        """Measure on all ranks; each figure is that of the slowest. Raises WorkerError."""
        # One timeline is enough, and one file cannot hold two.
        others = replace(asked, timeline=None)
        answers = self.ask([as_dict(asked if rank == 0 else others) for rank in range(_RANKS)])
        return RankSteps.slowest([RankSteps(**answer) for answer in answers])


# The picture of one step: what computed, and what was on which link meanwhile -------------------------------

#: Rows from the top: title, track, whether only turns on the link are drawn, colour.
_ROWS = (
    ("computation", Track.COMPUTE, False, "#4c72b0"),
    ("stalls", Track.STALLS, False, "#c44e52"),
    ("gathers", Track.GATHERS, False, "#55a868"),
    ("reduce-scatters", Track.REDUCTIONS, False, "#8cc99b"),
    ("device copies", Track.DEVICE_COPIES, True, "#ccb974"),
    ("disk reads", Track.DISK_READS, True, "#8172b3"),
    ("disk writes", Track.DISK_WRITES, True, "#b3a8d6"),
)
_PASS_COLOURS = {"forward": "#4c72b0", "backward": "#dd8452", "optimizer": "#937860"}
_CAPTION = "ms: one step of one of two ranks (forward blue, backward orange)"


def draw(timeline: Path, svg: Path) -> None:
    """Draw the last step of ``timeline`` into ``svg``."""
    slices, (begin, end) = last_step(read_slices(timeline))
    rows: dict[str, list[Bar]] = {}
    for title, track, link_only, colour in _ROWS:
        kept = [part for part in slices.get(track.value, []) if part.name.endswith("(link)") or not link_only]
        bars: list[Bar] = []
        for name, start, stop in kept:
            face = _PASS_COLOURS.get(name.split()[0], colour) if track is Track.COMPUTE else colour
            bars.append(Bar((start - begin) / 1e3, (stop - begin) / 1e3, face))
        if link_only:
            # Transfers that follow one another immediately are one bar: a reader could not tell them apart.
            spans = joined([(bar.begin, bar.end) for bar in bars], (end - begin) / 1e6)
            bars = [Bar(*span, colour) for span in spans]
        rows[title] = bars
    drawn = draw_bars([BarPanel(rows=rows)], length=(end - begin) / 1e3, caption=_CAPTION)
    write_output(svg, OutputKind.PICTURE, drawn)


def last_step(
    slices: Mapping[str, Sequence[TimelineSlice]],
) -> tuple[dict[str, list[TimelineSlice]], tuple[float, float]]:
    """``slices`` of the last step by track, and its begin and end: from its first forward pass."""
    compute = slices[Track.COMPUTE.value]
    begin = max(start for name, start, _ in compute if name == "forward 0")
    end = max(end for _, _, end in compute)
    return {
        track: [part for part in parts if part.end > begin and part.begin < end]
        for track, parts in slices.items()
    }, (begin, end)
