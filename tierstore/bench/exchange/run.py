"""Rows exchanged at once and in two steps over emulated nodes: where two steps pay, where not, and what AUTO says.

For each link between nodes (latency x bandwidth) the ranks fit AUTO's model with messages of some sizes, as a run does
when its ranks have joined, and are then measured with messages of other sizes: flat, hierarchical and flat again take
turns, so that every round has a ratio of both and one of the flat exchange to itself. The noise floor is what the latter
ratios' medians reach in nine of ten cases; where both ways are within it of each other, either is right.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tierstore.bench.checks import at_least
from tierstore.bench.exchange.network import Network, NodeLinks, node_links
from tierstore.bench.exchange.rank import LinkAnswer, LinkRequest, SizeSamples
from tierstore.bench.processes.ranks import start_ranks
from tierstore.bench.processes.spawn import close_input, end, receive, send
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import INTERNAL, Figures, ratios
from tierstore.config import as_dict
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig
from tierstore.parallel.exchange_model import ExchangeModel, MessageCost
from tierstore.parallel.nodes import NodeGrid
from tierstore.stats import percentile


class ExchangeVerdict(StrEnum):
    """Which way was faster, beyond the noise floor."""

    FLAT = "flat"
    HIERARCHICAL = "hierarchical"
    TIE = "tie"


@dataclass(frozen=True, kw_only=True)
class ExchangeBench(Figures):
    """What to measure: every latency with every bandwidth of a node, for every layout (nodes x ranks on each), and messages
    of every size over each. A rank's link within its node is the same for all.
    """

    layouts: tuple[str, ...] = ("2x2", "2x3", "3x2")
    latencies_s: tuple[float, ...] = (0.2e-3, 10e-3, 50e-3)
    bandwidths_bytes_per_s: tuple[int, ...] = (20_000_000, 80_000_000)
    message_bytes: tuple[int, ...] = (2 << 10, 64 << 10, 384 << 10)
    probe_bytes: tuple[int, ...] = field(default=(1 << 10, 24 << 10, 160 << 10), metadata=INTERNAL)
    within: LinkConfig = field(
        default_factory=lambda: LinkConfig(bandwidth=25_000_000, latency=0.5e-3), metadata=INTERNAL
    )
    rounds: int = field(default=7, metadata=INTERNAL)
    network: Network = field(default=Network.AUTO, metadata=INTERNAL)

    def __post_init__(self) -> None:
        at_least(1, rounds=self.rounds)
        for name in ("layouts", "latencies_s", "bandwidths_bytes_per_s", "message_bytes"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: expected one at least")
        at_least(0, latency=min(self.latencies_s))
        at_least(1, bandwidth=min(self.bandwidths_bytes_per_s), message_bytes=min(self.message_bytes))
        for layout in self.layouts:
            grid_of(layout)


def grid_of(layout: str) -> NodeGrid:
    """``NODESxRANKS``. Raises ConfigError for another text, and for one node or one rank on each."""
    nodes, _, each = layout.partition("x")
    if not (nodes.isdecimal() and each.isdecimal() and int(nodes) > 1 and int(each) > 1):
        raise ConfigError(f"layout: expected NODESxRANKS, two of each at least, got {layout!r}")
    return NodeGrid(int(nodes), int(each))


@dataclass(frozen=True, kw_only=True)
class ExchangeCase(Figures):
    """One size of messages over one link between nodes. ``ratio``: of the hierarchical exchange to the flat one, the median
    of the rounds; ``again_ratio``: of the flat one to itself. ``auto``: what AUTO would do, from its model.
    """

    layout: str
    latency_s: float
    bandwidth_bytes_per_s: int
    message_bytes: int
    flat_s: float
    hierarchical_s: float
    hierarchical_to_flat_ratio: float
    again_ratio: float
    flat_messages_count: int
    hierarchical_messages_count: int
    predicted_flat_s: float
    predicted_hierarchical_s: float
    auto: ExchangeVerdict
    round_ratios: Sequence[float] = field(metadata=INTERNAL)

    def faster(self, noise: float) -> ExchangeVerdict:
        """The faster way, where it is by more than ``noise``."""
        if abs(self.hierarchical_to_flat_ratio - 1) <= noise:
            return ExchangeVerdict.TIE
        return ExchangeVerdict.HIERARCHICAL if self.hierarchical_to_flat_ratio < 1 else ExchangeVerdict.FLAT

    def auto_right(self, noise: float) -> bool:
        """Whether AUTO takes the faster way; either is right in a tie."""
        return self.faster(noise) in (ExchangeVerdict.TIE, self.auto)


@dataclass(frozen=True, kw_only=True)
class ExchangeResult(Figures):
    """What ``run`` found. ``noise_ratio``: the noise floor."""

    asked: ExchangeBench
    network: str
    noise_ratio: float
    hierarchical_faster_count: int
    flat_faster_count: int
    ties_count: int
    auto_right_count: int
    cases: Sequence[ExchangeCase]


def run(bench: ExchangeBench, say: Callable[[str], None] = lambda _: None) -> ExchangeResult:
    """Measures. Raises ConfigError, CapabilityError (no namespaces where they were asked for), WorkerError."""
    cases: list[ExchangeCase] = []
    network = ""
    for layout in bench.layouts:
        with node_links(bench.network, grid_of(layout).nodes) as links:
            if not network:
                network = links.describe()
                say(network)
            cases += _of_layout(bench, layout, links, say)
    return summary(bench, network, cases)


def summary(bench: ExchangeBench, network: str, cases: Sequence[ExchangeCase]) -> ExchangeResult:
    """The verdicts over all ``cases``, by their common noise floor."""
    noise = percentile([abs(case.again_ratio - 1) for case in cases], 90)
    faster = [case.faster(noise) for case in cases]
    return ExchangeResult(
        asked=bench,
        network=network,
        noise_ratio=noise,
        hierarchical_faster_count=faster.count(ExchangeVerdict.HIERARCHICAL),
        flat_faster_count=faster.count(ExchangeVerdict.FLAT),
        ties_count=faster.count(ExchangeVerdict.TIE),
        auto_right_count=sum(case.auto_right(noise) for case in cases),
        cases=cases,
    )


def _of_layout(
    bench: ExchangeBench, layout: str, links: NodeLinks, say: Callable[[str], None]
) -> Iterator[ExchangeCase]:
    grid = grid_of(layout)
    processes = start_ranks(
        "tierstore.bench.exchange.rank",
        grid.ranks,
        [str(grid.each)],
        namespaces=links.of_ranks(grid.each),
    )
    try:
        for latency_s, bandwidth in itertools.product(bench.latencies_s, bench.bandwidths_bytes_per_s):
            node = LinkConfig(bandwidth=bandwidth, latency=latency_s)
            say(f"{layout}: {node.describe()}")
            asked = LinkRequest(
                within=bench.within,
                between=links.limit(node, grid.each),
                probe_bytes=bench.probe_bytes,
                message_bytes=bench.message_bytes,
                rounds=bench.rounds,
            )
            for process in processes:
                send(process, as_dict(asked))
            # All ranks have the times of the slowest.
            answers = [receive(process, f"rank {rank}") for rank, process in enumerate(processes)]
            yield from _cases(layout, node, bench.message_bytes, LinkAnswer(**answers[0]))
    finally:
        for process in processes:
            close_input(process)
        for process in processes:
            end(process)


def _cases(layout: str, node: LinkConfig, sizes: Sequence[int], answer: LinkAnswer) -> Iterator[ExchangeCase]:
    model = ExchangeModel(
        grid_of(layout), **{name: MessageCost(*line) for name, line in answer.model.items()}
    )
    for nbytes, found in zip(sizes, answer.sizes, strict=True):
        samples = SizeSamples(**found)
        both_flat = [(a + b) / 2 for a, b in zip(samples.flat_s, samples.again_s, strict=True)]
        to_flat = ratios(samples.hierarchical_s, both_flat)
        yield ExchangeCase(
            layout=layout,
            latency_s=node.latency,
            bandwidth_bytes_per_s=node.bandwidth,
            message_bytes=nbytes,
            flat_s=statistics.median(both_flat),
            hierarchical_s=statistics.median(samples.hierarchical_s),
            hierarchical_to_flat_ratio=statistics.median(to_flat),
            again_ratio=statistics.median(ratios(samples.again_s, samples.flat_s)),
            flat_messages_count=samples.flat_messages,
            hierarchical_messages_count=samples.hierarchical_messages,
            predicted_flat_s=model.flat.seconds(nbytes),
            predicted_hierarchical_s=model.hierarchical.seconds(nbytes),
            auto=ExchangeVerdict.HIERARCHICAL if nbytes < model.below_bytes else ExchangeVerdict.FLAT,
            round_ratios=to_flat,
        )


def measurements(result: ExchangeResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for case in result.cases:
        how: dict[str, float | str] = {
            "layout": case.layout,
            "latency_s": case.latency_s,
            "bandwidth": case.bandwidth_bytes_per_s,
            "message_bytes": case.message_bytes,
        }
        yield measured("flat", case.flat_s, "s", Better.LOWER, parameters=how)
        yield derived("hierarchical to flat", case.round_ratios, "ratio", Better.LOWER, parameters=how)
        yield counted("messages between nodes", case.hierarchical_messages_count, "messages", parameters=how)
    yield derived(
        "auto right", result.auto_right_count / len(result.cases), "ratio", Better.HIGHER, target=1.0
    )
