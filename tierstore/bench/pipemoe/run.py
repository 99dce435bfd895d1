"""Whether AUTO's number of chunks is the best one: layers over limited links, with experts on an emulated device.

Ranks run the passes of a MoE layer as a training run does, forward and backward, in every number of chunks in turn, and in
AUTO's. Its models are fitted on all-to-alls and layers of other sizes, before. Each pass is compared with the best of those
measured, and with one chunk, round by round; where AUTO's number is one of those measured, the two that ought to be equal
say how much of a difference is noise.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace

from tierstore.bench.checks import at_least, more_than_0
from tierstore.bench.pipemoe.cases import (
    DEGREES,
    FITTED_ROWS,
    ROW_BYTES,
    EmulatedMachine,
    ScoredLayer,
    scored_layers,
    spread,
)
from tierstore.bench.pipemoe.models import FittedMachine, FittedPass, PredictedPass, fit_pass
from tierstore.bench.pipemoe.rank import LayerRequest, LayerSamples
from tierstore.bench.processes.ranks import AskedRanks
from tierstore.bench.results.document import Better, Measurement, derived, measured
from tierstore.bench.results.figures import Figures, named
from tierstore.links import LinkConfig
from tierstore.machine_profile import Cost, fit_cost
from tierstore.stats import percentile

#: How much longer than the best AUTO may take, and how many of the passes must keep that; how much longer than one chunk.
CLOSE, WANTED_SHARE, NOT_WORSE = 1.05, 0.95, 1.05
#: Where communication and computation are equal: times the longer of the two, beside what cannot overlap.
OVERLAP = 1.2
#: One chunk, and several: what a chunk adds is fitted on these.
_FITTED_DEGREES = (1, 6)
_FITTED_TURNS, _FITTED_ROUNDS = 2, 3


@dataclass(frozen=True, kw_only=True)
class PipelineBench:
    """What to measure: ``layers`` of the 60, spread over them, each in ``rounds`` rounds. ``slowdown``: how many times as
    long everything that is emulated takes, where the machine itself is too busy to be ignored.
    """

    layers: int = 60
    rounds: int = 5
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        at_least(1, **{"--cases": self.layers, "--rounds": self.rounds})
        more_than_0(**{"--slowdown": self.slowdown})


@dataclass(frozen=True, kw_only=True)
class ChunkTime(Figures):
    """The median time of a pass in so many chunks."""

    chunks: int = field(metadata=named("chunks_count"))
    pass_s: float


@dataclass(frozen=True, kw_only=True)
class PassScore(Figures):
    """One pass of one layer. Ratios are medians over rounds of AUTO's time to another's of the same round; ``same_ratio``:
    to that of its own number of chunks, measured once more. ``limit_s``: what overlap allows where it is asked for.
    """

    phase: str
    ranks: int
    rows: int = field(metadata=named("rows_count"))
    latency_s: float
    communication_to_computation_ratio: float
    auto_degree: int = field(metadata=named("auto_chunks_count"))
    wanted_degree: int = field(metadata=named("wanted_chunks_count"))
    best_degree: int = field(metadata=named("best_chunks_count"))
    auto_s: float
    best_s: float
    one_s: float
    predicted_s: float
    network_s: float
    device_s: float
    to_best_ratio: float
    to_one_ratio: float
    same_ratio: float | None
    limit_s: float | None
    times: Sequence[ChunkTime]

    @property
    def capped(self) -> bool:
        """Whether more chunks than any rank's experts allow would be better."""
        return self.wanted_degree > max(DEGREES) == self.auto_degree


@dataclass(frozen=True, kw_only=True)
class PipelineResult(Figures):
    """What ``run`` found. ``noise_ratio``: the 90th percentile of how far two measurements of one thing are apart."""

    layers: int
    rounds: int
    passes: Sequence[PassScore]
    close_share_ratio: float
    worst_to_best_ratio: float
    worst_to_one_ratio: float
    median_to_one_ratio: float
    noise_ratio: float
    prediction_error_ratio: float
    overlap_worst_ratio: float | None


def run(bench: PipelineBench, say: Callable[[str], None] = lambda _: None) -> PipelineResult:
    """Measures. Raises ConfigError, WorkerError."""
    scores: list[PassScore] = []
    chosen = spread(list(scored_layers(bench.slowdown)), bench.layers)
    for count, layers in itertools.groupby(chosen, key=lambda layer: layer.machine.ranks):
        with AskedRanks("tierstore.bench.pipemoe.rank", count) as ranks:
            measuring = _Measuring(ranks, count, bench.rounds)
            for layer in layers:
                say(
                    f"{count} ranks, starts of {layer.machine.latency_s * 1e3:g} ms, communication "
                    f"{layer.machine.ratio:g} of computation, {layer.rows} rows"
                )
                scores += measuring.score(layer)
    return summary(scores, bench)


def summary(scores: Sequence[PassScore], bench: PipelineBench) -> PipelineResult:
    """``scores`` as one result."""
    same = [abs(score.same_ratio - 1) for score in scores if score.same_ratio is not None]
    asked = [score.best_s / score.limit_s for score in scores if score.limit_s is not None]
    return PipelineResult(
        layers=len(scores) // 2,
        rounds=bench.rounds,
        passes=scores,
        close_share_ratio=sum(score.to_best_ratio <= CLOSE for score in scores) / len(scores),
        worst_to_best_ratio=max(score.to_best_ratio for score in scores),
        worst_to_one_ratio=max(score.to_one_ratio for score in scores),
        median_to_one_ratio=statistics.median(score.to_one_ratio for score in scores),
        noise_ratio=percentile(same, 90) if same else 0.0,
        prediction_error_ratio=statistics.median(
            abs(score.predicted_s / score.auto_s - 1) for score in scores
        ),
        overlap_worst_ratio=max(asked, default=None),
    )


class _Measuring:
    """What one set of ranks measures; models are fitted when they are first needed, and kept."""

    def __init__(self, ranks: AskedRanks, count: int, rounds: int) -> None:
        self._ranks, self._count, self._rounds = ranks, count, rounds
        self._exchanges: dict[LinkConfig, Cost] = {}
        self._devices: dict[float, tuple[FittedPass, FittedPass]] = {}

    def score(self, layer: ScoredLayer) -> list[PassScore]:
        """The forward and the backward pass of ``layer``."""
        fitted = self._fitted(layer.machine)
        asked = layer.machine.layer(layer.rows, layer.seed)
        loads = self._ask(asked, [(1, 1)], rounds=0)
        predicted = fitted.forward_of(loads), fitted.backward_of(loads)
        auto = tuple(each.auto(max(DEGREES)).degree for each in predicted)
        found = self._ask(asked, [*((r, r) for r in DEGREES), (auto[0], auto[1])], rounds=self._rounds)
        return [
            score_pass(layer, phase, each, samples)
            for phase, each, samples in zip(
                ("forward", "backward"), predicted, (found.forward_s, found.backward_s), strict=True
            )
        ]

    def _fitted(self, machine: EmulatedMachine) -> FittedMachine:
        if machine.link not in self._exchanges:
            self._exchanges[machine.link] = self._fit_exchange(machine.link)
        if machine.ratio not in self._devices:
            self._devices[machine.ratio] = self._fit_device(machine)
        return FittedMachine(self._exchanges[machine.link], *self._devices[machine.ratio])

    def _fit_exchange(self, link: LinkConfig) -> Cost:
        """The line through all-to-alls of sizes that no chunk is meant to have."""
        away = ROW_BYTES * (self._count - 1) / self._count
        sizes = [round(rows * away) for rows in (40, 160, 480, *FITTED_ROWS)]
        found = self._answer(LayerRequest(link=link, sizes=sizes, rounds=_FITTED_TURNS * _FITTED_ROUNDS))
        points = [
            (size, spent) for size, times in zip(sizes, found.forward_s, strict=True) for spent in times
        ]
        return fit_cost([size for size, _ in points], [spent for _, spent in points])

    def _fit_device(self, machine: EmulatedMachine) -> tuple[FittedPass, FittedPass]:
        """Computation of both directions, over links that are not limited."""
        forward: dict[int, list[list[float]]] = {}
        backward: dict[int, list[list[float]]] = {}
        # In turns, so that a machine whose speed drifts treats all sizes alike.
        for _ in range(_FITTED_TURNS):
            for seed, rows in enumerate(FITTED_ROWS, start=1000):
                asked = replace(machine.layer(rows, seed), link=LinkConfig())
                found = self._ask(asked, [(r, r) for r in _FITTED_DEGREES], rounds=_FITTED_ROUNDS)
                for samples, times in ((forward, found.forward_s), (backward, found.backward_s)):
                    pooled = samples.setdefault(found.computed, [[] for _ in _FITTED_DEGREES])
                    for kept, more in zip(pooled, times, strict=True):
                        kept += more
        return fit_pass(forward, _FITTED_DEGREES), fit_pass(backward, _FITTED_DEGREES)

    def _ask(self, asked: LayerRequest, degrees: list[tuple[int, int]], *, rounds: int) -> LayerSamples:
        return self._answer(replace(asked, degrees=degrees, rounds=rounds))

    def _answer(self, asked: LayerRequest) -> LayerSamples:
        answers = self._ranks.ask([asdict(asked)] * self._count)
        return LayerSamples.slowest([LayerSamples(**answer) for answer in answers])


def score_pass(
    layer: ScoredLayer, phase: str, predicted: PredictedPass, samples: Sequence[Sequence[float]]
) -> PassScore:
    """``samples``: by round, of each of ``DEGREES`` and of AUTO's choice."""
    chosen = predicted.auto(max(DEGREES))
    times = dict(zip(DEGREES, samples, strict=False))
    medians = {r: statistics.median(found) for r, found in times.items()}
    best = min(medians, key=lambda r: medians[r])
    auto = samples[len(DEGREES)]

    def ratio(r: int) -> float:
        return statistics.median(own / other for own, other in zip(auto, times[r], strict=True))

    equal = layer.machine.ratio == 1.0 and phase == "forward"
    return PassScore(
        phase=phase,
        ranks=layer.machine.ranks,
        rows=layer.rows,
        latency_s=layer.machine.latency_s,
        communication_to_computation_ratio=predicted.network_s(1) / predicted.device_s(1),
        auto_degree=chosen.degree,
        wanted_degree=chosen.wanted,
        best_degree=best,
        auto_s=statistics.median(auto),
        best_s=medians[best],
        one_s=medians[1],
        predicted_s=chosen.seconds,
        network_s=predicted.network_s(1),
        device_s=predicted.device_s(1),
        to_best_ratio=ratio(best),
        to_one_ratio=ratio(1),
        same_ratio=ratio(chosen.degree) if chosen.degree in times else None,
        limit_s=OVERLAP * predicted.longer_s + predicted.exposed_s(best) if equal else None,
        times=[ChunkTime(chunks=r, pass_s=spent) for r, spent in medians.items()],
    )


def measurements(result: PipelineResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for score in result.passes:
        how: dict[str, float | str] = {
            "phase": score.phase,
            "ranks": score.ranks,
            "rows": score.rows,
            "latency_s": score.latency_s,
            "ratio": round(score.communication_to_computation_ratio, 2),
        }
        yield measured("pass, AUTO's chunks", score.auto_s, "s", Better.LOWER, parameters=how)
        yield derived("AUTO to the best", score.to_best_ratio, "ratio", Better.LOWER, parameters=how)
        yield derived("AUTO to one chunk", score.to_one_ratio, "ratio", Better.LOWER, parameters=how)
    yield derived(
        "passes within 5% of the best", result.close_share_ratio, "ratio", Better.HIGHER, target=WANTED_SHARE
    )
    yield derived("worst to one chunk", result.worst_to_one_ratio, "ratio", Better.LOWER, target=NOT_WORSE)
