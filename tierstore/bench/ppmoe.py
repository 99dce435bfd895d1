"""Pipeline MoE against experts over data ranks: bytes by link, and where links within the group are fast enough to pay.

Three ways to bring S tokens of T ranks to their experts and back take turns, over real ranks on Gloo: ``rows`` (the ranks
have the same tokens, and send the rows of their experts back: ``tierstore.moe.indexed``), ``all-reduce`` (the same with
the paper's sum over ranks) and ``all-to-all`` (each rank has S / T tokens; ``tierstore.moe.exchange``). The first two go
over a link within the group, the last over one between groups, both limited (``LimitedGroup``).

* **Bytes**: those that ranks sent, from their own counters, against ``tierstore.plan.ppmoe``'s formulas, to the byte; of
  the messages timed here, and of whole passes over experts, forward and backward.
* **Crossover**: the link between groups is such that two all-to-alls take ``pass_s``; that within is swept around the
  speed at which both should take as long, ``T / K`` of it for the all-reduce and ``T / 2`` for rows. Where the ratio of
  times (medians over rounds of ways that took turns) falls to 1 is found on logarithmic scales.

The noise floor is what two all-to-alls of one round differ by. Experts are chosen in turns, so loads are equal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tierstore.bench.checks import at_least, more_than_0
from tierstore.bench.processes.ranks import run_ranks
from tierstore.bench.results.document import Better, Measurement, counted, derived
from tierstore.bench.results.figures import INTERNAL, Figures, named, prefixed
from tierstore.errors import ConfigError
from tierstore.plan.ppmoe import RowBytes
from tierstore.stats import median_line

if TYPE_CHECKING:
    from torch import Tensor

    from tierstore.moe.dispatch import Dispatch
    from tierstore.moe.exchange import Rows
    from tierstore.parallel import RankGroup

_TIMEOUT_S = 300.0
_ITEM_BYTES = 4
#: Speeds within the group, in times of the one at which both ways should take as long.
_SWEEP = (0.6, 0.8, 1.0, 1.25, 1.6)
#: By how much a crossover that was found may differ from the predicted one.
TOLERANCE = 0.15


@dataclass(frozen=True, kw_only=True)
class PpmoeBench(Figures):
    """What to measure: ``cases`` of (T, K); ``tokens`` S of ``width`` in fp32, ``experts`` experts; two all-to-alls take
    ``pass_s``, and each ratio is the median of ``rounds``.
    """

    cases: Sequence[tuple[int, int]] = field(
        default=((2, 1), (2, 2), (4, 1), (4, 2), (4, 4)), metadata=INTERNAL
    )
    tokens: int = field(default=1024, metadata=named("tokens_count"))
    width: int = field(default=128, metadata=named("width_count"))
    experts: int = field(default=8, metadata=named("experts_count"))
    rounds: int = field(default=5, metadata=named("rounds_count"))
    pass_s: float = 0.1

    def __post_init__(self) -> None:
        at_least(1, tokens=self.tokens, width=self.width, experts=self.experts, rounds=self.rounds)
        more_than_0(pass_s=self.pass_s)
        for ranks, top_k in self.cases:
            if ranks < 2 or not 1 <= top_k <= self.experts:
                raise ConfigError(
                    f"cases: expected at least 2 ranks and 1 to {self.experts} experts a token, got {ranks}, {top_k}"
                )
            if self.experts % ranks or self.tokens % (ranks * self.experts):
                raise ConfigError(
                    f"tokens: expected a multiple of {ranks} ranks x {self.experts} experts, which it divides, "
                    f"got {self.tokens}"
                )


@dataclass(frozen=True, kw_only=True)
class SentBytes(Figures):
    """Bytes that all ranks sent, and those of the formulas: of the messages of one way, and of whole passes over experts
    with their backward pass (None: the paper's way, which is not one of ours).
    """

    way: str
    sent_bytes: int
    formula_bytes: int
    passes_bytes: int | None
    passes_formula_bytes: int | None

    @property
    def equal(self) -> bool:
        return self.sent_bytes == self.formula_bytes and self.passes_bytes == self.passes_formula_bytes


@dataclass(frozen=True, kw_only=True)
class Crossover(Figures):
    """How many times as fast the link within the group must be, for ``way`` to take as long as two all-to-alls.

    ``found_ratio``: None where times did not cross. ``time_ratio``: by the speeds of the sweep, how long ``way`` took, in
    times of two all-to-alls.
    """

    way: str
    expected_ratio: float
    found_ratio: float | None
    link_ratio: Sequence[float]
    time_ratio: Sequence[float]

    @property
    def error(self) -> float:
        """By how much it was missed; infinite where times did not cross."""
        return math.inf if self.found_ratio is None else abs(self.found_ratio / self.expected_ratio - 1)


@dataclass(frozen=True, kw_only=True)
class PpmoeCase(Figures):
    """T tensor-parallel ranks, K experts a token. ``noise_ratio``: the median difference of two equal all-to-alls."""

    ranks: int = field(metadata=named("tensor_ranks_count"))
    top_k: int = field(metadata=named("top_k_count"))
    sent: Sequence[SentBytes]
    crossovers: Sequence[Crossover]
    noise_ratio: float


@dataclass(frozen=True, kw_only=True)
class PpmoeResult(Figures):
    """What ``run`` found. ``worst_ratio``: by how much the worst crossover differs from the expected one."""

    bench: str = "ppmoe"
    backend: str = "gloo"
    asked: PpmoeBench = field(metadata=prefixed(""))
    cases: Sequence[PpmoeCase]
    same_bytes: bool
    worst_ratio: float | None


def run(bench: PpmoeBench, announce: Callable[[str], None] = lambda line: None) -> PpmoeResult:
    """Measures, one world of ranks for each T. Raises WorkerError."""
    cases: list[PpmoeCase] = []
    for ranks in sorted({ranks for ranks, _ in bench.cases}):
        announce(f"{ranks} ranks")
        answers = run_ranks(
            "tierstore.bench.ppmoe", [json.dumps(asdict(bench))], ranks=ranks, timeout_s=_TIMEOUT_S
        )
        # All ranks see the seconds of rank 0; what they sent is added up.
        for number, (_, top_k) in enumerate(case for case in bench.cases if case[0] == ranks):
            cases.append(_case(bench, ranks, top_k, [_Found(**answer[number]) for answer in answers]))
    errors = [crossover.error for case in cases for crossover in case.crossovers]
    return PpmoeResult(
        asked=bench,
        cases=cases,
        same_bytes=all(way.equal for case in cases for way in case.sent),
        worst_ratio=max(errors) if max(errors) < math.inf else None,
    )


def measurements(result: PpmoeResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for case in result.cases:
        for way in case.sent:
            how = _parameters(case, way.way)
            yield counted("sent", way.sent_bytes, "bytes", Better.LOWER, parameters=how)
        for crossover in case.crossovers:
            how = _parameters(case, crossover.way)
            if crossover.found_ratio is not None:
                found = [crossover.found_ratio / crossover.expected_ratio]
                yield derived("crossover to expected", found, "ratio", Better.NEITHER, parameters=how)


def _parameters(case: PpmoeCase, way: str) -> dict[str, float | str]:
    return {"ranks": case.ranks, "experts a token": case.top_k, "way": way}


def _case(bench: PpmoeBench, ranks: int, top_k: int, found: Sequence[_Found]) -> PpmoeCase:
    formulas = _formulas(bench, ranks, top_k)
    of_group = {
        "rows": formulas.rows,
        "all-reduce": formulas.all_reduce,
        "all-to-all": formulas.all_to_all,
    }
    # A row's weight goes beside its gradient, to the expert and back; rows without moving need it once.
    weights = top_k * bench.tokens * (ranks - 1) / ranks * _ITEM_BYTES
    passes = {
        "rows": 2 * formulas.rows + weights,
        "all-to-all": 2 * formulas.all_to_all + 2 * weights / ranks,
    }
    sent = [
        SentBytes(
            way=way,
            sent_bytes=sum(rank.sent[way] for rank in found),
            formula_bytes=round(ranks * each),
            passes_bytes=sum(rank.passes[way] for rank in found) if way in passes else None,
            passes_formula_bytes=round(ranks * passes[way]) if way in passes else None,
        )
        for way, each in of_group.items()
    ]
    crossovers = []
    for way, expected in _expected(formulas).items():
        times = found[0].times[way]
        links = [speed * expected for speed in _SWEEP]
        crossovers.append(
            Crossover(
                way=way,
                expected_ratio=expected,
                found_ratio=crossing(links, times),
                link_ratio=links,
                time_ratio=times,
            )
        )
    return PpmoeCase(ranks=ranks, top_k=top_k, sent=sent, crossovers=crossovers, noise_ratio=found[0].noise)


def _formulas(bench: PpmoeBench, ranks: int, top_k: int) -> RowBytes:
    return RowBytes(tokens=bench.tokens, width=bench.width, itemsize=_ITEM_BYTES, ranks=ranks, top_k=top_k)


def _expected(formulas: RowBytes) -> dict[str, float]:
    return {"rows": formulas.rows_crossover, "all-reduce": formulas.all_reduce_crossover}


def crossing(speeds: Sequence[float], ratios: Sequence[float]) -> float | None:
    """At which speed ``ratios`` fall to 1, by the line through the medians of slopes and intercepts on logarithmic scales
    (Theil and Sen); None where that lies outside of ``speeds`` (ascending).
    """
    x, y = [math.log(speed) for speed in speeds], [math.log(ratio) for ratio in ratios]
    slope, intercept = median_line(x, y)
    if slope >= 0:
        return None
    found = math.exp(-intercept / slope)
    return found if speeds[0] <= found <= speeds[-1] else None


# One rank ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """One rank's answer for one case: bytes by way, and the medians of times in those of two all-to-alls by way."""

    sent: dict[str, int]
    passes: dict[str, int]
    times: dict[str, list[float]]
    noise: float


def _rank(bench: PpmoeBench) -> list[_Found]:
    import torch

    from tierstore.parallel import ParallelConfig, launch

    torch.set_num_threads(1)
    with launch(ParallelConfig(timeout_s=_TIMEOUT_S), device="cpu") as mesh:
        world = mesh.world
        return [_Case(bench, world, top_k).found() for ranks, top_k in bench.cases if ranks == world.size]


class _Case:
    """The messages of one case, over groups of the same ranks with limits of their own."""

    def __init__(self, bench: PpmoeBench, world: RankGroup, top_k: int) -> None:
        import torch

        from tierstore.moe.dispatch import dispatch

        self._bench, self._world, self._top_k = bench, world, top_k
        turn_T = torch.arange(bench.tokens) % bench.experts
        #: Token i goes to experts i, i + 1, ...: of any run of tokens each expert gets as many.
        expert_TK = (turn_T.unsqueeze(1) + torch.arange(top_k)) % bench.experts
        own_TK = expert_TK[: bench.tokens // world.size]  # those of any data rank

        def plan(chosen_TK: Tensor) -> Dispatch:
            return dispatch(chosen_TK, torch.bincount(chosen_TK.flatten(), minlength=bench.experts))

        self._whole, self._own = plan(expert_TK), plan(own_TK)
        share = bench.experts // world.size
        self._starts = tuple(share * rank for rank in range(world.size + 1))
        self._tokens_SD = torch.zeros(bench.tokens, bench.width)
        self._buffers = {
            plan: torch.zeros(rows.rows + 1, bench.width)
            for plan, rows in (("whole", self._whole), ("own", self._own))
        }

    def found(self) -> _Found:
        formulas = _formulas(self._bench, self._world.size, self._top_k)
        between = formulas.all_to_all / self._bench.pass_s
        times, noise = {}, []
        for way, expected in _expected(formulas).items():
            medians = []
            for speed in _SWEEP:
                link, other = self._group(speed * expected * between), self._group(between)
                ratios = []
                for number in range(self._bench.rounds + 1):
                    within = self._timed(way, link)
                    across, again = (self._timed("all-to-all", other) for _ in range(2))
                    if number:  # the first touches memory, and opens connections
                        ratios.append(2 * within / (across + again))
                        noise.append(abs(across / again - 1))
                medians.append(statistics.median(ratios))
            times[way] = medians
        sent = {way: self._sent(way) for way in ("rows", "all-reduce", "all-to-all")}
        passes = {way: self._passes(way) for way in ("rows", "all-to-all")}
        return _Found(sent, passes, times, statistics.median(noise))

    def _group(self, bandwidth: float) -> RankGroup:
        """The world's ranks over a link of their own."""
        from tierstore._native import Link
        from tierstore.parallel import Channel, LimitedGroup

        world = self._world
        communicators = {channel: world.communicator(channel) for channel in Channel}
        return LimitedGroup(world.rank, world.ranks, communicators, link=Link(bandwidth))

    def _timed(self, way: str, group: RankGroup) -> float:
        self._world.barrier()
        started = time.perf_counter()
        self._send(way, group)
        self._world.barrier()
        return time.perf_counter() - started

    def _send(self, way: str, group: RankGroup) -> None:
        """The messages of a forward pass."""
        if way == "all-reduce":
            group.all_reduce(self._tokens_SD).wait()
            return
        rows_ND = self._buffers["whole" if way == "rows" else "own"]
        rows = self._rows(way, group)
        rows_MD = rows.at_experts(rows_ND)
        (chunk,) = rows.chunks(1)
        chunk.to_experts(rows_ND, rows_MD).wait()
        chunk.to_tokens(rows_MD, rows_ND).wait()

    def _rows(self, way: str, group: RankGroup) -> Rows:
        import torch

        from tierstore.moe.exchange import ExchangedRows
        from tierstore.moe.indexed import IndexedRows
        from tierstore.parallel.hierarchical import FlatExchange

        asked = tuple(range(self._starts[group.rank], self._starts[group.rank + 1]))
        if way == "rows":
            return IndexedRows(group, self._starts, self._whole, asked)
        loads = [stop - start for start, stop in itertools.pairwise(self._own.offsets)]
        load_SE = torch.tensor([loads] * group.size)
        return ExchangedRows(FlatExchange(group), self._starts, load_SE, asked)

    def _sent(self, way: str) -> int:
        group = self._group(math.inf)
        self._send(way, group)
        return _bytes_of(group)

    def _passes(self, way: str) -> int:
        """What a pass over experts sends, forward and backward."""
        import torch

        from tierstore.moe import ExpertShape, InMemoryExperts, SaveActivations
        from tierstore.moe.computing import ExpertPass, Weighting, compute_experts

        group, bench = self._group(math.inf), self._bench
        plan = self._whole if way == "rows" else self._own
        shape = ExpertShape(bench.width, 8)
        source = InMemoryExperts(shape, layers=[0], experts=bench.experts)
        rows = self._rows(way, group)
        call = ExpertPass(0, shape, source, plan, rows, Weighting.BY_EXPERT, SaveActivations.SAVE)
        tokens = plan.place_TK.shape[0]
        x_TD = torch.ones(tokens, bench.width, requires_grad=True)
        weight_TK = torch.ones(tokens, self._top_k, requires_grad=True)
        torch.autograd.backward(compute_experts(x_TD, weight_TK, call).sum())
        return _bytes_of(group)


def _bytes_of(group: RankGroup) -> int:
    return sum(traffic.sent_bytes for traffic in group.traffic.values())


def _asked(plain: dict[str, Any]) -> PpmoeBench:
    return PpmoeBench(**{**plain, "cases": [tuple(case) for case in plain["cases"]]})


if __name__ == "__main__":
    print(json.dumps([asdict(found) for found in _rank(_asked(json.loads(sys.argv[1])))]), flush=True)
    # Gloo's threads have aborted processes whose interpreter was being taken apart; the answer is out.
    os._exit(0)
