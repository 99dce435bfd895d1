"""Whether AUTO's number of chunks is the best (PipeMoE): layers over limited links, with experts on an emulated device.

    python experiments/pipemoe.py [--layers 60] [--rounds 5] [--slowdown 1] [--experts 12]
    python experiments/pipemoe.py --layers 12 --experts 1 2 4 8
    python experiments/pipemoe.py --svg docs/chunks.svg --rounds 25

2 and 4 ranks run the passes of a MoE layer as a training run does, forward and backward, in every number of chunks in
turn and in AUTO's: ``--layers`` of 60 layers, spread over them (2 numbers of ranks, 2 starts of an all-to-all, 5 ratios
of communication to computation, 3 sizes). AUTO's models are fitted before, on all-to-alls and layers of other sizes.
Each pass is compared with the best of those measured, and with one chunk, round by round. Where AUTO's number is one of
those measured, the two that ought to be equal show how much of a difference is noise. ``--slowdown``: links and devices
take that many times as long, for a machine that others use.

``--experts``: experts that a rank owns, of as many layers each. More chunks than that divide each expert's rows into parts,
as ``auto-split`` does. The table by number of experts sets AUTO beside fixed degrees, as the paper's Table VI does, and
beside AUTO with whole experts alone.

``--svg`` draws, from one rank's timeline, the fastest passes of one layer in 1, 2 and 4 chunks: on the network the
turns of messages on the limited link, on the device the experts of each chunk from when its rows have arrived.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from emulation import OUTPUT, SleepingDevice, SlowExperts, finish, options, run_ranks, start, table

from tierstore.links import CollectiveLink, LinkConfig, open_link
from tierstore.machine_profile import Cost, fit_cost
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.moe.dispatch import Dispatch, dispatch
from tierstore.moe.exchange import ExchangedRows, PassLoads, rows_of
from tierstore.moe.source import ChunkDegrees, Chunking, ExpertSourceRef, InMemoryExperts
from tierstore.parallel import Channel, Collective, Mesh, Work
from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    Degree,
    LayerPass,
    Share,
    backward_pass,
    chosen_degrees,
    forward_pass,
    pass_seconds,
)
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import LimitedGroup
from tierstore.reports.bars import Bar, BarPanel, draw_bars, joined
from tierstore.stats import percentile
from tierstore.timeline import NullTimeline, TimelineSink, TimelineSlice, Track, open_timeline, read_slices

#: Experts that a rank owns, if no other number is given. Their loads are drawn, so chunks are not quite equal.
EXPERTS = 12
#: Bytes of one row, and of its weight, which travels beside its gradient.
ROW_BYTES, WEIGHT_BYTES = 1024, 4
#: Width of the experts' hidden layer: their real products cost little.
HIDDEN = 4
#: Chunks that are measured.
DEGREES = (1, 2, 3, 4, 6, 8)
#: Those that the paper compares itself with (Table VI).
FIXED = (1, 2, 4, 8)
#: Rows of a rank: of layers that are scored, and of those that models are fitted on.
ROWS, FITTED_ROWS = (512, 1024, 1536), (384, 768, 1280)
#: One chunk, and several: what a chunk adds is fitted on these, in turns of some rounds each.
FITTED_DEGREES, FITTED_TURNS, FITTED_ROUNDS = (1, 6), 2, 3
#: Seconds of an all-to-all of the middle size without its start: passes take 60 to 300 ms, of which 5% are several times
#: what two cores that drive four ranks vary by.
EXCHANGE_S = 0.027
#: Starts of an all-to-all: as between machines, and as where each message is dear.
LATENCIES_S = (1e-3, 9e-3)
RATIOS = (0.2, 0.5, 1.0, 2.0, 5.0)
RANKS = (2, 4)
EXPERT_START_S = 1.5e-4
#: How much longer than the best, and than one chunk, AUTO may take.
CLOSE, NOT_WORSE = 1.05, 1.05
#: The name of a message's turn on the link, in a timeline.
TURN = "turn (link)"
DRAWN = (1, 2, 4)
COLOURS = {"dispatch": "#55a868", "combine": "#8172b3", "forward": "#4c72b0", "backward": "#dd8452"}


@dataclass(frozen=True, slots=True)
class Machine:
    """``ranks`` on a network whose all-to-alls start in ``latency_s``, with devices on which the experts of a layer of the
    middle size take 1 / ``ratio`` times as long as its dispatch and combine. ``experts``: those that a rank owns.
    """

    ranks: int
    latency_s: float
    ratio: float
    slowdown: float = 1.0
    experts: int = EXPERTS

    @property
    def link(self) -> LinkConfig:
        away = ROWS[1] * ROW_BYTES * (self.ranks - 1) / self.ranks
        bandwidth = round(away / (EXCHANGE_S * self.slowdown))
        return LinkConfig(bandwidth=bandwidth, latency=self.latency_s * self.slowdown)

    @property
    def speed(self) -> Cost:
        seconds = 2 * EXCHANGE_S * self.slowdown / self.ratio - self.experts * EXPERT_START_S
        return Cost(EXPERT_START_S, ROWS[1] / max(seconds, 1e-9))


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer whose passes are measured in every number of chunks. ``seed``: of its experts' loads."""

    machine: Machine
    rows: int
    seed: int


def layers(count: int, slowdown: float, experts: int = EXPERTS) -> list[Layer]:
    """``count`` of the 60 layers, evenly over them."""
    every = [
        Layer(Machine(ranks, latency_s, ratio, slowdown, experts), rows, seed)
        for seed, (ranks, latency_s, ratio, rows) in enumerate(
            itertools.product(RANKS, LATENCIES_S, RATIOS, ROWS)
        )
    ]
    if count >= len(every):
        return every
    return [every[(2 * number + 1) * len(every) // (2 * count)] for number in range(count)]


# Passes of real ranks ---------------------------------------------------------------------------------------


class DrawnLink(CollectiveLink):
    """The link of all-to-alls, whose last turn can be drawn."""

    def __init__(self) -> None:
        super().__init__(None)
        self.timeline: TimelineSink = NullTimeline()


class DrawnGroup(LimitedGroup):
    """A group that draws the turns of its all-to-alls, beside the time from their issue until they were waited for."""

    def __init__(self, *arguments: Any, exchange: DrawnLink, **given: Any) -> None:
        super().__init__(*arguments, exchange=exchange, **given)
        self._drawn = exchange

    def _issue(
        self,
        operation: Collective,
        channel: Channel,
        sent: Sequence[int],
        start: Callable[[], Any],
        finish: Callable[[], None] | None = None,
    ) -> Work:
        work = super()._issue(operation, channel, sent, start, finish)
        if operation is Collective.ALL_TO_ALL:
            self._drawn.timeline.add(Track.EXCHANGES, TURN, *self._drawn.last_turn)
        return work


#: Seconds of the slowest rank, forward and backward, by degrees, then by round.
Samples = list[list[list[float]]]


class Passes:
    """Runs the passes of layers on the ranks that have joined; every rank calls it alike, and gets the same seconds."""

    def __init__(self, mesh: Mesh, link: DrawnLink) -> None:
        self.mesh, self._link = mesh, link

    @classmethod
    @contextlib.contextmanager
    def of_ranks(cls) -> Iterator[Self]:
        """A collective of all ranks."""
        link = DrawnLink()
        groups = partial(DrawnGroup, link=CollectiveLink(None), exchange=link)
        with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
            yield cls(mesh, link)

    def measure(
        self,
        layer: Layer,
        link: LinkConfig,
        degrees: Sequence[tuple[int, int]],
        rounds: int,
        timeline: TimelineSink | None = None,
    ) -> tuple[Samples, PassLoads]:
        """The passes of ``layer`` in ``degrees`` (forward, backward) chunks, in an order drawn anew each round, so that none
        always follows the same other; the first round is not kept. And the rows of the slowest rank.
        """
        self._link.link, self._link.timeline = open_link(link), timeline or NullTimeline()
        world, experts = self.mesh.data.size, layer.machine.experts * self.mesh.data.size
        slot = ExpertSourceRef(Chunking(timeline))
        shape = ExpertShape(ROW_BYTES // 4, HIDDEN)
        own = InMemoryExperts(shape, layers=[0], experts=experts)
        slot.target = SlowExperts(own, SleepingDevice(layer.machine.speed))
        generator = torch.Generator().manual_seed(layer.seed)
        chosen_RT = torch.randint(experts, (world, layer.rows), generator=generator)
        load_RE = torch.stack([rank_T.bincount(minlength=experts) for rank_T in chosen_RT])
        plan = dispatch(chosen_RT[self.mesh.data.rank].unsqueeze(1), load_RE[self.mesh.data.rank])
        x_TD = torch.randn(layer.rows, ROW_BYTES // 4, requires_grad=True)
        weight_TK, grad_TD = torch.ones(layer.rows, 1), torch.ones_like(x_TD)

        def rows(parts: int) -> tuple[Dispatch, ExchangedRows]:
            # Found anew in every pass, as a training step does.
            divided, found = rows_of(plan, load_RE, self.mesh, training=True, parts=parts)
            assert isinstance(found, ExchangedRows)
            return divided, found

        draw, places = random.Random(layer.seed), range(len(degrees))  # the same on all ranks
        spent = torch.zeros(2, len(degrees), rounds, dtype=torch.float64)
        for number in range(rounds + 1):
            for place in draw.sample(places, len(places)):
                parts = -(-max(degrees[place]) // layer.machine.experts)
                slot.chunking.degrees = ChunkDegrees(*degrees[place], parts)
                self.mesh.data.barrier()
                started = time.perf_counter()
                call = ExpertPass(0, shape, slot, *rows(parts), Weighting.BY_EXPERT, SaveActivations.SAVE)
                y_TD = compute_experts(x_TD, weight_TK, call)
                forward_s = time.perf_counter() - started
                self.mesh.data.barrier()
                started = time.perf_counter()
                torch.autograd.backward(y_TD, grad_TD)
                if number:
                    spent[:, place, number - 1] = torch.tensor([forward_s, time.perf_counter() - started])
        most = rows(1)[1].most()
        self._link.link, self._link.timeline = None, NullTimeline()
        if rounds:
            self.mesh.world.max(spent)
        return spent.tolist(), most

    def exchanges(self, link: LinkConfig, sizes: Sequence[int], rounds: int) -> list[list[float]]:
        """Seconds of all-to-alls in which a rank sends each of ``sizes`` bytes, by size, then by round."""
        group = self.mesh.data
        self._link.link = open_link(link)
        spent = torch.zeros(len(sizes), rounds + 1, dtype=torch.float64)
        for number in range(rounds + 1):
            for place, size in enumerate(sizes):
                numel = max(size // 4 // (group.size - 1), 1)
                given, received = torch.zeros(group.size * numel), torch.empty(group.size * numel)
                splits = [numel] * group.size
                group.barrier()
                started = time.perf_counter()
                group.all_to_all(received, given, splits, splits).wait()
                spent[place, number] = time.perf_counter() - started
        self._link.link = None
        self.mesh.world.max(spent)
        found: list[list[float]] = spent[:, 1:].tolist()
        return found


# What AUTO predicts -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FittedPass:
    """Seconds of computation of one direction: ``rows`` of the slowest rank, and what every chunk adds."""

    rows: Cost
    chunk_s: float


def fit_pass(samples: Mapping[int, Sequence[Sequence[float]]]) -> FittedPass:
    """``samples``: by computed rows, then of ``FITTED_DEGREES``, the seconds without a limited link."""
    alone = {rows: statistics.median(found[0]) for rows, found in samples.items()}
    more = FITTED_DEGREES[1] - FITTED_DEGREES[0]
    added = [(statistics.median(found[1]) - alone[rows]) / more for rows, found in samples.items()]
    chunk_s = max(statistics.median(added), 0.0)
    # A pass in one chunk has that once too.
    return FittedPass(fit_cost(list(alone), [max(spent - chunk_s, 0.0) for spent in alone.values()]), chunk_s)


@dataclass(frozen=True, slots=True)
class PredictedPass:
    """One pass by its model."""

    costs: ChunkCosts
    work: LayerPass

    def network_s(self, degree: int) -> float:
        """For how long the network is busy."""
        sent, back = self.work.dispatch, self.work.combine
        starts = degree * self.costs.alpha_a * (sent.starts + back.starts)
        return starts + self.costs.beta_a * (sent.amount + back.amount)

    def device_s(self, degree: int) -> float:
        """For how long the device is busy."""
        return degree * self.costs.alpha_e + self.costs.beta_e * self.work.experts.amount


class Models:
    """AUTO's models of a machine, fitted when they are first needed, and kept."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._exchanges: dict[LinkConfig, Cost] = {}
        self._devices: dict[tuple[float, int], list[FittedPass]] = {}

    def predict(self, layer: Layer) -> list[PredictedPass]:
        """The forward and the backward pass of ``layer``: in the latter gradients and weights travel."""
        machine = layer.machine
        if machine.link not in self._exchanges:
            self._exchanges[machine.link] = self._fit_exchange(machine)
        device = machine.ratio, machine.experts
        if device not in self._devices:
            self._devices[device] = self._fit_device(machine)
        _, loads = self._passes.measure(layer, machine.link, [(1, 1)], rounds=0)
        exchange, travelling = self._exchanges[machine.link], loads.travelling
        sent = travelling * ROW_BYTES
        ways = (
            forward_pass(sent, 0.0),
            backward_pass(sent, 0.0, weights_bytes=travelling * WEIGHT_BYTES),
        )
        found = []
        for way, computed in zip(ways, self._devices[device], strict=True):
            costs = ChunkCosts(exchange.latency_s, 1 / exchange.per_s, computed.chunk_s, 1.0)
            experts = Share(1, computed.rows.seconds(loads.computed))
            found.append(PredictedPass(costs, LayerPass(way.dispatch, experts, way.combine)))
        return found

    def _fit_exchange(self, machine: Machine) -> Cost:
        """The line through all-to-alls of sizes that no chunk is meant to have."""
        away = ROW_BYTES * (machine.ranks - 1) / machine.ranks
        sizes = [round(rows * away) for rows in (40, 160, 480, *FITTED_ROWS)]
        found = self._passes.exchanges(machine.link, sizes, FITTED_TURNS * FITTED_ROUNDS)
        points = [(size, spent) for size, times in zip(sizes, found, strict=True) for spent in times]
        return fit_cost([size for size, _ in points], [spent for _, spent in points])

    def _fit_device(self, machine: Machine) -> list[FittedPass]:
        """Computation of both directions, over links that are not limited."""
        samples: tuple[dict[int, list[list[float]]], ...] = ({}, {})
        # In turns, so that a machine whose speed drifts treats all sizes alike.
        for _ in range(FITTED_TURNS):
            for seed, rows in enumerate(FITTED_ROWS, start=1000):
                layer, degrees = Layer(machine, rows, seed), [(r, r) for r in FITTED_DEGREES]
                found, loads = self._passes.measure(layer, LinkConfig(), degrees, FITTED_ROUNDS)
                for pooled, times in zip(samples, found, strict=True):
                    for kept, more in zip(
                        pooled.setdefault(int(loads.computed), [[], []]), times, strict=True
                    ):
                        kept += more
        return [fit_pass(pooled) for pooled in samples]


# Scores -----------------------------------------------------------------------------------------------------


def score(
    layer: Layer, phase: str, predicted: PredictedPass, chosen: Degree, samples: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """One pass. ``samples``: by round, of each of ``DEGREES`` and of AUTO's choice, ``chosen``. Ratios are medians of
    rounds, of AUTO's time to another's of the same round; ``same_ratio``: to its own number of chunks, measured once more;
    ``to_whole_ratio``: to the best number of chunks of whole experts.
    """
    experts = layer.machine.experts
    whole = min(
        (r for r in DEGREES if r <= experts), key=lambda r: pass_seconds(predicted.costs, predicted.work, r)
    )
    times = dict(zip(DEGREES, samples, strict=False))
    medians = {r: statistics.median(found) for r, found in times.items()}
    best = min(medians, key=lambda r: medians[r])
    auto = samples[len(DEGREES)]

    def ratio(r: int) -> float:
        return statistics.median(own / other for own, other in zip(auto, times[r], strict=True))

    busier_s = max(predicted.network_s(1), predicted.device_s(1))
    limit_s = None
    if layer.machine.ratio == 1.0 and phase == "forward":
        # 1.2 times the busier of the two, and what cannot overlap: the first dispatch, the last combine, more starts.
        limit_s = 1.2 * busier_s + pass_seconds(predicted.costs, predicted.work, best) - busier_s
    return {
        "phase": phase,
        "ranks": layer.machine.ranks,
        "experts_count": layer.machine.experts,
        "rows_count": layer.rows,
        "latency_s": layer.machine.link.latency,
        "communication_to_computation_ratio": predicted.network_s(1) / predicted.device_s(1),
        "auto_chunks_count": chosen.degree,
        "wanted_chunks_count": chosen.wanted,
        "best_chunks_count": best,
        "auto_s": statistics.median(auto),
        "best_s": medians[best],
        "one_s": medians[1],
        "predicted_s": chosen.seconds,
        "to_best_ratio": ratio(best),
        "to_one_ratio": ratio(1),
        "to_fixed_ratio": {str(r): ratio(r) for r in FIXED},
        "to_whole_ratio": 1.0 if chosen.degree <= experts else ratio(whole),
        "same_ratio": ratio(chosen.degree) if chosen.degree in times else None,
        "limit_s": limit_s,
        "times_s": {str(r): spent for r, spent in medians.items()},
    }


def rank(chosen: Sequence[Layer], rounds: int) -> list[dict[str, Any]]:
    """Scores of ``chosen``, alike on all ranks."""
    rows = []
    with Passes.of_ranks() as passes:
        models = Models(passes)
        for layer in chosen:
            predicted = models.predict(layer)
            experts, most = layer.machine.experts, max(DEGREES)
            ways = [(of.costs, of.work) for of in predicted]
            auto = chosen_degrees(ways, present=(1, 1), owned=min(experts, most), most=most)
            degrees = [*((r, r) for r in DEGREES), (auto[0].degree, auto[1].degree)]
            found, _ = passes.measure(layer, layer.machine.link, degrees, rounds)
            each = zip(("forward", "backward"), predicted, auto, found, strict=True)
            for phase, of, choice, samples in each:
                rows.append(score(layer, phase, of, choice, samples))
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    same = [abs(row["same_ratio"] - 1) for row in rows if row["same_ratio"] is not None]
    limited = [row["best_s"] / row["limit_s"] for row in rows if row["limit_s"] is not None]
    return {
        "close_share_ratio": sum(row["to_best_ratio"] <= CLOSE for row in rows) / len(rows),
        "worst_to_best_ratio": max(row["to_best_ratio"] for row in rows),
        "worst_to_one_ratio": max(row["to_one_ratio"] for row in rows),
        "median_to_one_ratio": statistics.median(row["to_one_ratio"] for row in rows),
        "noise_ratio": percentile(same, 90) if same else 0.0,
        "prediction_error_ratio": statistics.median(
            abs(row["predicted_s"] / row["auto_s"] - 1) for row in rows
        ),
        "overlap_worst_ratio": max(limited, default=None),
        "capped_count": sum(
            row["wanted_chunks_count"] > max(DEGREES) == row["auto_chunks_count"] for row in rows
        ),
    }


def saved_by_experts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By experts of a rank, the part of a pass's time that AUTO saves, mean, median and highest: of each fixed degree, of
    the slowest of these, of the best measured, and of the best number of chunks of whole experts.
    """
    found = []
    for experts in sorted({row["experts_count"] for row in rows}):
        own = [row for row in rows if row["experts_count"] == experts]
        to = {f"r = {r}": [row["to_fixed_ratio"][str(r)] for row in own] for r in FIXED}
        to["the slowest"] = [min(row["to_fixed_ratio"].values()) for row in own]
        to["the best measured"] = [row["to_best_ratio"] for row in own]
        to["whole experts"] = [row["to_whole_ratio"] for row in own]
        saved = {
            name: {
                "mean_ratio": 1 - statistics.mean(ratios),
                "median_ratio": 1 - statistics.median(ratios),
                "highest_ratio": 1 - min(ratios),
            }
            for name, ratios in to.items()
        }
        found.append({"experts_count": experts, "passes_count": len(own), "saved": saved})
    return found


# The picture ------------------------------------------------------------------------------------------------


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


def draw_rank(timelines: str, slowdown: float, rounds: int) -> None:
    """Passes in 1, 2 and 4 chunks; rank 0 writes their timelines."""
    with Passes.of_ranks() as passes:
        layer = Layer(Machine(2, LATENCIES_S[0], 1.0, slowdown), ROWS[1], 1)
        for chunks in DRAWN:
            # One file cannot hold the timelines of two ranks.
            path = Path(timelines) / f"{chunks}.json" if passes.mesh.world.rank == 0 else None
            with open_timeline(path) as timeline:
                passes.measure(layer, layer.machine.link, [(chunks, chunks)], rounds, timeline)


def fastest_passes(slices: Mapping[str, Sequence[TimelineSlice]]) -> tuple[DrawnPass, DrawnPass]:
    """Of a timeline's ``slices`` the forward and backward pass that ended soonest: others were disturbed."""
    messages, experts = slices[Track.EXCHANGES.value], slices[Track.COMPUTE.value]
    # A message's name is known where it is issued, its time on the link: both are in the order of issue.
    issued = sorted((each for each in messages if each.name != TURN), key=lambda each: each.begin)
    turns = sorted((each for each in messages if each.name == TURN), key=lambda each: each.begin)
    network = [turn._replace(name=each.name) for each, turn in zip(issued, turns, strict=True)]
    forward, backward = (
        [_pass(*parts) for parts in zip(_runs(network, phase), _runs(experts, phase), strict=True)]
        for phase in ("forward", "backward")
    )
    return min(zip(forward, backward, strict=True), key=lambda both: both[1].end - both[0].begin)


def _pass(messages: Sequence[TimelineSlice], experts: Sequence[TimelineSlice]) -> DrawnPass:
    """Its first expert is asked for before its rows are there."""
    device = []
    for chunk in experts:
        rows = chunk.name.replace("experts", "dispatch")
        arrived = max(each.end for each in messages if each.name == rows)
        device.append(chunk._replace(begin=max(chunk.begin, arrived)))
    return DrawnPass(messages, device)


def _runs(slices: Sequence[TimelineSlice], phase: str) -> list[list[TimelineSlice]]:
    """The slices of each pass of ``phase``: forward and backward passes take turns."""
    runs = itertools.groupby(slices, key=lambda each: each.name.split()[0])
    return [list(run) for name, run in runs if name == phase]


def draw(drawn: Mapping[int, tuple[DrawnPass, DrawnPass]]) -> str:
    """An SVG of a forward and a backward pass by number of chunks."""
    panels = []
    for chunks, passes in drawn.items():
        zero = passes[0].begin
        marks = [
            ((each.begin - zero) / 1e3, f"{phase}: {(each.end - each.begin) / 1e3:.0f} ms")
            for phase, each in zip(("forward", "backward"), passes, strict=True)
        ]
        rows = {"network": list(_message_bars(passes, zero)), "experts": list(_expert_bars(passes, zero))}
        panels.append(BarPanel(heading=f"r = {chunks}", marks=marks, rows=rows))
    length = max(backward.end - forward.begin for forward, backward in drawn.values())
    caption = (
        "ms: dispatch (green) and combine (violet) of chunks; experts, forward (blue) and backward (orange)"
    )
    return draw_bars(panels, length=length / 1e3, caption=caption)


def _message_bars(passes: Sequence[DrawnPass], zero: float) -> Iterator[Bar]:
    """A bar for what each chunk sends one way: in the backward pass rows, with their weights in a message of its own."""
    messages = [each for drawn in passes for each in drawn.network]
    for name, parts in itertools.groupby(messages, key=lambda each: each.name):
        *_, what, _, number = name.split()
        # Messages no more than 0.2 ms apart are one bar.
        spans = joined([((each.begin - zero) / 1e3, (each.end - zero) / 1e3) for each in parts], 0.2)
        yield from (Bar(*span, COLOURS[what], f"{what[0]}{number}") for span in spans)


def _expert_bars(passes: Sequence[DrawnPass], zero: float) -> Iterator[Bar]:
    for name, begin, end in itertools.chain(*(drawn.device for drawn in passes)):
        phase, *_, number = name.split()
        yield Bar((begin - zero) / 1e3, (end - zero) / 1e3, COLOURS[phase], f"e{number}")


def main() -> None:
    asked = options(__doc__, layers=60, rounds=5, slowdown=1.0, experts=(EXPERTS,), svg=None)
    if asked.svg:
        with tempfile.TemporaryDirectory() as directory:
            run_ranks(draw_rank, 2, directory, asked.slowdown, asked.rounds)
            drawn = {
                chunks: fastest_passes(read_slices(Path(directory) / f"{chunks}.json")) for chunks in DRAWN
            }
        Path(asked.svg).write_text(draw(drawn))
        seconds = {str(r): [(each.end - each.begin) / 1e6 for each in both] for r, both in drawn.items()}
        finish({"drawn_pass_s": seconds})
    rows: list[dict[str, Any]] = []
    for experts in asked.experts:
        every = layers(asked.layers, asked.slowdown, experts)
        for ranks in RANKS:
            of_size = [layer for layer in every if layer.machine.ranks == ranks]
            rows += run_ranks(rank, ranks, of_size, asked.rounds)[0] if of_size else []
    found, saved = summary(rows), saved_by_experts(rows)
    table(
        f"{len(rows) // 2} layers, forward and backward, {asked.rounds} rounds", rows, "phase", "ranks", "experts_count",
        "rows_count", "latency_s", "communication_to_computation_ratio", "auto_chunks_count", "best_chunks_count", "auto_s",
        "best_s", "one_s", "to_best_ratio", "to_one_ratio", "predicted_s",
        auto_chunks_count="AUTO's r", best_chunks_count="best r", one_s="r = 1",
    )  # fmt: skip
    OUTPUT.line(
        f"AUTO within 5% of the best r in {found['close_share_ratio']:.1%} of {len(rows)} passes (wanted: 95%), worst "
        f"{found['worst_to_best_ratio']:.3f}; to r = 1: median {found['median_to_one_ratio']:.3f}, worst "
        f"{found['worst_to_one_ratio']:.3f} (wanted: {NOT_WORSE}); predicted within {found['prediction_error_ratio']:.1%} "
        f"(median); noise floor {found['noise_ratio']:.1%}; the experts of a rank cap r in {found['capped_count']} passes"
    )
    if found["overlap_worst_ratio"] is not None:
        OUTPUT.line(
            f"overlap, where communication equals computation: at most {found['overlap_worst_ratio']:.3f} of 1.2 x the "
            "longer plus what cannot overlap"
        )
    for of in saved:
        compared = [{"of": name, **ratios} for name, ratios in of["saved"].items()]
        title = f"what AUTO saves of a pass's time, with {of['experts_count']} experts on a rank"
        table(title, compared, "of", "mean_ratio", "median_ratio", "highest_ratio")
    finish({**found, "by_experts": saved, "passes": rows})


if __name__ == "__main__":
    start(main)
