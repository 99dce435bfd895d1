"""A picture of a MoE layer's passes in 1, 2 and 4 chunks, from the timeline of one of its ranks.

The layer is one of those that ``bench pipemoe`` scores: its dispatch and combine take about as long as its experts. What is
drawn of the network are the turns of messages on the limited link; of the device, the experts of each chunk, from when
its rows have arrived until the last one is done.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tierstore.bench.checks import at_least, more_than_0
from tierstore.bench.pictures.bars import Bar, BarPanel, BarRow, draw_bars, joined
from tierstore.bench.pictures.slices import TimelineSlice, read_slices
from tierstore.bench.pipemoe.cases import ROWS, EmulatedMachine
from tierstore.bench.pipemoe.rank import TURN, LayerRequest
from tierstore.bench.processes.ranks import AskedRanks
from tierstore.bench.results.document import Better, Measurement, measured
from tierstore.bench.results.figures import Figures, named
from tierstore.timeline import Track

_RANKS, _LATENCY_S, _SEED = 2, 1e-3, 1
_DRAWN = (1, 2, 4)
#: Messages no further apart are one bar.
_GAP_MS = 0.2
_COLOURS = {"dispatch": "#55a868", "combine": "#8172b3", "forward": "#4c72b0", "backward": "#dd8452"}
_CAPTION = "ms: dispatch (green) and combine (violet) of each chunk, and its experts, forward (blue) and backward (orange)"


@dataclass(frozen=True, kw_only=True)
class ChunkPictureBench:
    """What to draw: the fastest of ``rounds`` + 1. ``slowdown``: all that is emulated takes so many times its usual time."""

    svg: Path
    rounds: int = 5
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, **{"--rounds": self.rounds})
        more_than_0(**{"--slowdown": self.slowdown})


@dataclass(frozen=True, kw_only=True)
class DrawnPasses(Figures):
    """The passes in so many chunks that were drawn: from the first message's issue until the last one was waited for."""

    chunks: int = field(metadata=named("chunks_count"))
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class ChunkPicture(Figures):
    """What ``run`` drew."""

    svg: Path
    passes: Sequence[DrawnPasses]


def run(bench: ChunkPictureBench, say: Callable[[str], None] = lambda _: None) -> ChunkPicture:
    """Measures and draws. Raises ConfigError, WorkerError, OSError."""
    timelines: dict[int, DrawnLayer] = {}
    with (
        tempfile.TemporaryDirectory() as directory,
        AskedRanks("tierstore.bench.pipemoe.rank", _RANKS) as ranks,
    ):
        for chunks in _DRAWN:
            say(f"passes in {chunks} chunk{'s' * (chunks > 1)}")
            timeline = Path(directory) / f"{chunks}.json"
            asked = _request(bench, chunks)
            # One file cannot hold the timelines of two ranks.
            ranks.ask([{**asdict(asked), "timeline": str(timeline)}, *[asdict(asked)] * (_RANKS - 1)])
            timelines[chunks] = fastest_passes(read_slices(timeline))
    bench.svg.write_text(draw(timelines))
    return ChunkPicture(
        svg=bench.svg,
        passes=[
            DrawnPasses(chunks=chunks, forward_s=layer.forward.seconds, backward_s=layer.backward.seconds)
            for chunks, layer in timelines.items()
        ],
    )


def measurements(result: ChunkPicture) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for one in result.passes:
        for phase, spent in (("forward", one.forward_s), ("backward", one.backward_s)):
            how: dict[str, float | str] = {"chunks": one.chunks, "phase": phase}
            yield measured("drawn pass", [spent], "s", Better.LOWER, parameters=how)


def _request(bench: ChunkPictureBench, chunks: int) -> LayerRequest:
    machine = EmulatedMachine(_RANKS, _LATENCY_S * bench.slowdown, 1.0, bench.slowdown)
    return replace(machine.layer(ROWS[1], _SEED), degrees=[(chunks, chunks)], rounds=bench.rounds)


@dataclass(frozen=True)
class DrawnPass:
    """One pass: the turns of its messages and the experts of its chunks, in order, in microseconds."""

    network: Sequence[TimelineSlice]
    device: Sequence[TimelineSlice]

    @property
    def begin(self) -> float:
        return self.network[0].begin

    @property
    def end(self) -> float:
        return self.network[-1].end

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6


@dataclass(frozen=True)
class DrawnLayer:
    """A forward pass and the backward pass that follows it."""

    forward: DrawnPass
    backward: DrawnPass


def fastest_passes(slices: Mapping[str, Sequence[TimelineSlice]]) -> DrawnLayer:
    """Of the ``slices`` of a timeline the forward and backward pass that were over soonest: others were disturbed."""
    messages, experts = slices[Track.EXCHANGES.value], slices[Track.COMPUTE.value]
    # A message's name is known where it is issued, its time on the link: both are in the order of issue.
    issued = sorted((each for each in messages if each.name != TURN), key=lambda each: each.begin)
    turns = sorted((each for each in messages if each.name == TURN), key=lambda each: each.begin)
    network = [turn._replace(name=each.name) for each, turn in zip(issued, turns, strict=True)]
    forward, backward = (
        [_pass(*parts) for parts in zip(_runs(network, phase), _runs(experts, phase), strict=True)]
        for phase in ("forward", "backward")
    )
    layers = [DrawnLayer(*passes) for passes in zip(forward, backward, strict=True)]
    return min(layers, key=lambda layer: layer.backward.end - layer.forward.begin)


def _pass(messages: Sequence[TimelineSlice], experts: Sequence[TimelineSlice]) -> DrawnPass:
    """Its first expert is asked for before its rows are there."""
    device = []
    for chunk in experts:
        rows = chunk.name.replace("experts", "dispatch")
        arrived = max(each.end for each in messages if each.name == rows)
        device.append(chunk._replace(begin=max(chunk.begin, arrived)))
    return DrawnPass(messages, device)


def _runs(slices: Sequence[TimelineSlice], phase: str) -> list[list[TimelineSlice]]:
    """``slices`` of ``phase``, those of each pass: forward and backward passes take turns."""
    runs = itertools.groupby(slices, key=lambda each: each.name.split()[0])
    return [list(run) for name, run in runs if name == phase]


def draw(layers: Mapping[int, DrawnLayer]) -> str:
    """An SVG of ``layers``, by their number of chunks."""
    panels = []
    for chunks, layer in layers.items():
        passes = (("forward", layer.forward), ("backward", layer.backward))
        begin = layer.forward.begin
        panels.append(
            BarPanel(
                heading=f"r = {chunks}",
                marks=[
                    ((each.begin - begin) / 1e3, f"{phase}: {each.seconds * 1e3:.0f} ms")
                    for phase, each in passes
                ],
                rows=[
                    BarRow(
                        title="network", bars=[bar for _, each in passes for bar in _messages(each, begin)]
                    ),
                    BarRow(
                        title="experts", bars=[bar for _, each in passes for bar in _experts(each, begin)]
                    ),
                ],
            )
        )
    length = max(layer.backward.end - layer.forward.begin for layer in layers.values())
    return draw_bars(panels, length=length / 1e3, caption=_CAPTION)


def _messages(drawn: DrawnPass, zero: float) -> Iterator[Bar]:
    """A bar for what each chunk sends one way: rows, with their weights in a message of its own in the backward pass."""
    for name, parts in itertools.groupby(drawn.network, key=lambda each: each.name):
        *_, what, _, number = name.split()
        spans = joined([((each.begin - zero) / 1e3, (each.end - zero) / 1e3) for each in parts], _GAP_MS)
        yield from (Bar(*span, _COLOURS[what], f"{what[0]}{number}") for span in spans)


def _experts(drawn: DrawnPass, zero: float) -> Iterator[Bar]:
    for name, begin, end in drawn.device:
        phase, *_, number = name.split()
        yield Bar((begin - zero) / 1e3, (end - zero) / 1e3, _COLOURS[phase], f"e{number}")
