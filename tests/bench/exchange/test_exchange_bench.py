"""bench exchange: its verdicts by hand, its links, and tiny runs of real ranks. No test asserts a speed."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tierstore.bench.exchange import network
from tierstore.bench.exchange.network import Network, NodeLinks, node_links
from tierstore.bench.exchange.run import (
    ExchangeBench,
    ExchangeCase,
    ExchangeVerdict,
    grid_of,
    measurements,
    run,
    summary,
)
from tierstore.bench.processes.namespaces import RankNamespace, probe_namespaces, probe_netem
from tierstore.bench.results.figures import to_json
from tierstore.capabilities import Finding
from tierstore.errors import CapabilityError, ConfigError
from tierstore.links import LinkConfig
from tierstore.parallel.nodes import NodeGrid

CASE = ExchangeCase(
    layout="2x2",
    latency_s=1e-3,
    bandwidth_bytes_per_s=10**6,
    message_bytes=1000,
    flat_s=4e-3,
    hierarchical_s=3e-3,
    hierarchical_to_flat_ratio=0.75,
    again_ratio=1.0,
    flat_messages_count=2,
    hierarchical_messages_count=1,
    predicted_flat_s=4e-3,
    predicted_hierarchical_s=3e-3,
    auto=ExchangeVerdict.HIERARCHICAL,
    round_ratios=[0.75],
)


def test_verdicts_by_hand() -> None:
    """The flat exchange to itself: 1.00, 0.98 and 1.03. Nine tenths of the way up are 2.8%: 1.02 is a tie, 1.2 is not."""
    cases = [
        replace(CASE, again_ratio=1.0),
        replace(CASE, again_ratio=0.98, hierarchical_to_flat_ratio=1.2),
        replace(CASE, again_ratio=1.03, hierarchical_to_flat_ratio=1.02, auto=ExchangeVerdict.FLAT),
    ]
    found = summary(ExchangeBench(), "none", cases)
    assert found.noise_ratio == pytest.approx(0.028)
    assert [case.faster(found.noise_ratio) for case in cases] == [
        ExchangeVerdict.HIERARCHICAL,
        ExchangeVerdict.FLAT,
        ExchangeVerdict.TIE,
    ]
    counts = (found.hierarchical_faster_count, found.flat_faster_count, found.ties_count)
    assert (*counts, found.auto_right_count) == (1, 1, 1, 2)


def test_there_are_twelve_cases_and_more() -> None:
    bench = ExchangeBench()
    each = len(bench.latencies_s) * len(bench.bandwidths_bytes_per_s) * len(bench.message_bytes)
    assert each >= 12
    assert not set(bench.message_bytes) & set(bench.probe_bytes), "scored on sizes that it was not fitted on"


@pytest.mark.parametrize("layout", ["", "2", "1x2", "2x1", "2x", "ax2", "-2x2"])
def test_layouts_have_several_nodes_of_several_ranks(layout: str) -> None:
    assert grid_of("3x2") == NodeGrid(nodes=3, each=2)
    with pytest.raises(ConfigError, match="layout: expected NODESxRANKS"):
        ExchangeBench(layouts=(layout,))


def test_options_that_make_no_sense() -> None:
    for name in ("layouts", "latencies_s", "bandwidths_bytes_per_s", "message_bytes"):
        with pytest.raises(ConfigError, match=f"{name}: expected one at least"):
            ExchangeBench(**{name: ()})
    with pytest.raises(ConfigError, match="rounds: expected at least 1"):
        ExchangeBench(rounds=0)


def test_who_limits_the_links() -> None:
    """A node sends 12 MB/s after 1 ms: each of its three ranks 4 MB/s, where processes emulate it."""
    node = LinkConfig(bandwidth=12_000_000, latency=1e-3)
    emulated = NodeLinks((), Finding(False, "no netem"))
    assert emulated.limit(node, 3) == LinkConfig(bandwidth=4_000_000, latency=1e-3)
    assert emulated.of_ranks(3) == []
    assert emulated.describe() == "links between nodes are emulated within each process: no netem"
    namespaces = [RankNamespace(name, "10.0.0.1", {}) for name in ("a", "b")]
    asked: list[tuple[str, int, float]] = []

    def limit(namespace: RankNamespace, bandwidth: int) -> None:
        asked.append((namespace.name, bandwidth, 0.0))

    def delay(namespace: RankNamespace, *, bandwidth: int, latency_s: float) -> None:
        asked.append((namespace.name, bandwidth, latency_s))

    with (
        mock.patch.object(network, "limit_namespace", limit),
        mock.patch.object(network, "delay_namespace", delay),
    ):
        half = NodeLinks(namespaces, Finding(False, "no netem"))
        assert half.limit(node, 3) == LinkConfig(latency=1e-3)
        assert NodeLinks(namespaces, Finding(True, "")).limit(node, 3) == LinkConfig()
    assert asked == [(name, 12_000_000, latency) for latency in (0.0, 1e-3) for name in "ab"]
    assert [one.name for one in half.of_ranks(2)] == ["a", "a", "b", "b"]
    assert "emulated within each process: no netem" in half.describe()


def test_the_kernel_limits_where_it_can() -> None:
    """AUTO wants netem; NAMESPACES are refused with the reason, or made."""
    netem, namespaces = probe_netem(), probe_namespaces()
    assert netem.reason
    with node_links(Network.AUTO, 2) as links:
        assert len(links.namespaces) == (2 if netem.available else 0)
    if namespaces.available:
        with node_links(Network.NAMESPACES, 2) as links:
            assert len(links.namespaces) == 2
    else:
        with pytest.raises(CapabilityError, match="network namespaces"), node_links(Network.NAMESPACES, 2):
            pass


def _tiny(links: Network) -> ExchangeBench:
    return ExchangeBench(
        layouts=("2x2",),
        latencies_s=(1e-3,),
        bandwidths_bytes_per_s=(50_000_000,),
        message_bytes=(500, 2000),
        rounds=1,
        network=links,
    )


def test_a_tiny_run() -> None:
    said: list[str] = []
    found = run(_tiny(Network.PROCESS), said.append)
    assert said == [
        "links between nodes are emulated within each process: as asked",
        "2x2: 47.7 MiB/s after 1 ms",
    ]
    assert [case.message_bytes for case in found.cases] == [500, 2000]
    assert [(case.flat_messages_count, case.hierarchical_messages_count) for case in found.cases] == [
        (2, 1)
    ] * 2
    # Two messages of 1 ms each, one after the other; or one, behind the step within the node.
    assert all(case.flat_s >= 2e-3 and case.hierarchical_s >= 1.5e-3 for case in found.cases)
    assert len(list(measurements(found))) == 2 * 3 + 1
    assert to_json(found)["network"] == said[0]


@pytest.mark.slow
def test_a_tiny_run_in_namespaces() -> None:
    if not (able := probe_namespaces()).available:
        pytest.skip(able.reason)
    found = run(_tiny(Network.NAMESPACES))
    assert "network namespace" in found.network
    assert [case.hierarchical_messages_count for case in found.cases] == [1, 1]
