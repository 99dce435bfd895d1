"""Rows exchanged at once and in two steps over emulated nodes (SE-MoE, section 2.4.2): which is faster, and AUTO's choice.

    python experiments/exchange.py [--layouts 2x2 2x3 3x2] [--latencies-s 0.0002 0.01 0.05] [--network auto]

For each link between nodes (latency x bandwidth) the ranks fit AUTO's model with messages of some sizes, as a run does
when its ranks have joined. They are then measured with messages of other sizes: flat, hierarchical and flat again take
turns, so that every round has a ratio of both and one of the flat exchange to itself. The noise floor is the 90th
percentile of the latter ratios' medians; where both ways are within it of each other, either is right.

Between nodes stand network namespaces, each with a limited cable that its ranks share, where the kernel can delay
messages (``netem``; needs root, ip and tc). Elsewhere links are emulated in each process, and each rank has its part of
the bandwidth.

Exit status 1: AUTO chose the slower way in a case, beyond the noise floor.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from emulation import OUTPUT, finish, options, run_ranks, start, table

from tierstore.bench.namespaces import RankNamespace, limit_namespace, rank_namespaces
from tierstore.capabilities import Finding
from tierstore.errors import CapabilityError, ConfigError
from tierstore.links import CollectiveLink, LinkConfig, open_link
from tierstore.parallel import Collective, Mesh
from tierstore.parallel.config import ExchangeMode, ParallelConfig
from tierstore.parallel.hierarchical import ExchangeModel, FlatExchange, HierarchicalExchange
from tierstore.parallel.launching import launch, measured_model
from tierstore.parallel.layout import NodeGrid
from tierstore.parallel.limited import LimitedGroup
from tierstore.stats import percentile

#: A rank's link within its node.
WITHIN = LinkConfig(bandwidth=25_000_000, latency=0.5e-3)
#: What AUTO's model is fitted with.
PROBE_BYTES = (1 << 10, 24 << 10, 160 << 10)
#: What a namespace sends before its first limit, bytes a second.
UNLIMITED = 10 << 30


def grid_of(layout: str) -> NodeGrid:
    """``NODESxRANKS``. Raises ConfigError for another text, and for one node or one rank on each."""
    nodes, _, each = layout.partition("x")
    if not (nodes.isdecimal() and each.isdecimal() and int(nodes) > 1 and int(each) > 1):
        raise ConfigError(f"--layouts: expected NODESxRANKS, two of each at least, got {layout!r}")
    return NodeGrid(int(nodes), int(each))


def delay_namespace(namespace: RankNamespace, *, bandwidth: int, latency_s: float) -> None:
    """What ``namespace`` sends from now on leaves ``latency_s`` later, ``bandwidth`` bytes a second.

    Raises CapabilityError.
    """
    device = namespace.environment["GLOO_SOCKET_IFNAME"]
    delay = ["delay", f"{round(latency_s * 1e6)}us", "rate", f"{bandwidth * 8}bit"]
    command = ["tc", "-n", namespace.name, "qdisc", "replace", "dev", device, "root", "netem", *delay]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = [*done.stderr.strip().splitlines(), str(done.returncode)][0]
        raise CapabilityError(f"the kernel has no netem ({reason})")


def probe_netem() -> Finding:
    """Whether a namespace here can delay what it sends: one is made, with ``tc netem``, and removed."""
    try:
        with rank_namespaces(1, bandwidth=1 << 20, option="--network") as (namespace,):
            delay_namespace(namespace, bandwidth=1 << 20, latency_s=1e-3)
    except CapabilityError as error:
        return Finding(False, str(error))
    return Finding(True, "a namespace was made and delayed")


@contextlib.contextmanager
def node_namespaces(network: str, nodes: int) -> Iterator[tuple[Sequence[RankNamespace], Finding]]:
    """A namespace for each node, or none where each process limits by itself, and what was found about netem."""
    netem = Finding(False, "as asked") if network == "process" else probe_netem()
    if network == "process" or (network == "auto" and not netem.available):
        yield (), netem
        return
    with rank_namespaces(nodes, bandwidth=UNLIMITED, option="--network") as namespaces:
        yield namespaces, netem


def limit(namespaces: Sequence[RankNamespace], netem: Finding, node: LinkConfig, each: int) -> LinkConfig:
    """Limits what each node sends to ``node``, and returns what a rank's own link has to emulate."""
    if not namespaces:
        return replace(node, bandwidth=node.bandwidth // each)
    for namespace in namespaces:
        if netem.available:
            delay_namespace(namespace, bandwidth=node.bandwidth, latency_s=node.latency)
        else:
            limit_namespace(namespace, node.bandwidth)
    return LinkConfig() if netem.available else replace(node, bandwidth=0)


def rank(each: int, between: LinkConfig, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """AUTO's model over the link ``between`` nodes of ``each`` ranks, and the exchanges of ``sizes`` bytes."""
    inside, outside = CollectiveLink(None), CollectiveLink(None)
    groups = partial(LimitedGroup, link=CollectiveLink(None), exchange=inside, node=outside)
    config = ParallelConfig(exchange=ExchangeMode.HIERARCHICAL, node_ranks=each, timeout_s=60.0)
    with launch(config, device="cpu", make_group=groups) as mesh:
        mesh.world.barrier()
        inside.link, outside.link = open_link(WITHIN), open_link(between)
        assert isinstance(mesh.exchange, HierarchicalExchange)
        grid = NodeGrid(mesh.world.size // each, each)
        model = measured_model(mesh, grid, mesh.exchange, sizes=PROBE_BYTES)
        return {"model": model, "sizes": [exchanges(mesh, nbytes, rounds) for nbytes in sizes]}


def exchanges(mesh: Mesh, nbytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of an exchange by way and round, for the slowest rank, and messages of a rank to other nodes."""
    flat = FlatExchange(mesh.expert)
    ways = {"flat": flat, "hierarchical": mesh.exchange, "again": flat}
    size = mesh.expert.size
    given = torch.zeros((size, nbytes), dtype=torch.uint8)
    received = torch.empty_like(given)
    once_SS = torch.ones((size, size), dtype=torch.int64)
    seconds = torch.empty(len(ways), rounds + 1, dtype=torch.float64)
    messages = {}
    for number in range(rounds + 1):
        for way, (name, exchange) in enumerate(ways.items()):
            before = mesh.traffic()[Collective.ALL_TO_ALL].node_messages
            mesh.world.barrier()
            begun = time.perf_counter()
            exchange.all_to_all(received, given, once_SS).wait()
            seconds[way, number] = time.perf_counter() - begun
            messages[name] = mesh.traffic()[Collective.ALL_TO_ALL].node_messages - before
    mesh.world.max(seconds)
    # The first round finds everything cold.
    return {"seconds": dict(zip(ways, seconds[:, 1:].tolist(), strict=True)), "messages": messages}


def cases(
    layout: str, node: LinkConfig, sizes: Sequence[int], answer: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each size of messages over one link between nodes."""
    model: ExchangeModel = answer["model"]
    for nbytes, found in zip(sizes, answer["sizes"], strict=True):
        flat, hierarchical, again = (found["seconds"][way] for way in ("flat", "hierarchical", "again"))
        both = [(a + b) / 2 for a, b in zip(flat, again, strict=True)]
        yield {
            "layout": layout,
            "latency_s": node.latency,
            "bandwidth_bytes_per_s": node.bandwidth,
            "message_bytes": nbytes,
            "flat_s": statistics.median(both),
            "hierarchical_s": statistics.median(hierarchical),
            "hierarchical_to_flat_ratio": statistics.median(
                h / f for h, f in zip(hierarchical, both, strict=True)
            ),
            "again_ratio": statistics.median(a / f for a, f in zip(again, flat, strict=True)),
            "flat_messages_count": found["messages"]["flat"],
            "hierarchical_messages_count": found["messages"]["hierarchical"],
            "predicted_flat_s": model.flat.seconds(nbytes),
            "predicted_hierarchical_s": model.hierarchical.seconds(nbytes),
            "auto": "hierarchical" if nbytes < model.below_bytes else "flat",
        }


def judge(rows: Sequence[dict[str, Any]]) -> float:
    """Adds to each row which way was faster and whether AUTO was right, and returns the noise floor of all."""
    noise = percentile([abs(row["again_ratio"] - 1) for row in rows], 90)
    for row in rows:
        ratio = row["hierarchical_to_flat_ratio"]
        row["faster"] = "tie" if abs(ratio - 1) <= noise else "hierarchical" if ratio < 1 else "flat"
        row["auto_right"] = row["faster"] in ("tie", row["auto"])
    return noise


def main() -> None:
    asked = options(
        __doc__, layouts=("2x2", "2x3", "3x2"), latencies_s=(0.2e-3, 10e-3, 50e-3), rounds=7, network="auto",
        bandwidths_bytes_per_s=(20_000_000, 80_000_000), message_bytes=(2 << 10, 64 << 10, 384 << 10),
    )  # fmt: skip
    if asked.network not in ("auto", "namespaces", "process"):
        raise ConfigError(f"--network: expected auto, namespaces or process, got {asked.network!r}")
    rows: list[dict[str, Any]] = []
    for layout in asked.layouts:
        grid = grid_of(layout)
        with node_namespaces(asked.network, grid.nodes) as (nodes, netem):
            where = "network namespaces" if nodes else f"emulated within each process ({netem.reason})"
            OUTPUT.line(f"{layout}: links between nodes: {where}")
            for latency_s, bandwidth in itertools.product(asked.latencies_s, asked.bandwidths_bytes_per_s):
                node = LinkConfig(bandwidth=bandwidth, latency=latency_s)
                between = limit(nodes, netem, node, grid.each)
                places = [namespace for namespace in nodes for _ in range(grid.each)]
                # All ranks have the times of the slowest.
                answer = run_ranks(
                    rank, grid.ranks, grid.each, between, asked.message_bytes, asked.rounds, namespaces=places
                )[0]
                rows += cases(layout, node, asked.message_bytes, answer)
    noise = judge(rows)
    table(
        f"{len(rows)} cases, median of {asked.rounds} rounds; noise floor {noise:.1%}", rows, "layout", "latency_s",
        "bandwidth_bytes_per_s", "message_bytes", "flat_s", "hierarchical_s", "hierarchical_to_flat_ratio", "faster", "auto",
        "auto_right",
    )  # fmt: skip
    wrong = [row for row in rows if not row["auto_right"]]
    OUTPUT.line(f"AUTO is right in {len(rows) - len(wrong)} of {len(rows)} cases")
    failures = [
        f"{row['layout']}, {row['latency_s']} s, {row['message_bytes']} bytes: AUTO chose {row['auto']}, "
        f"{row['faster']} is faster"
        for row in wrong
    ]
    finish({"noise_ratio": noise, "cases": rows}, failures)


if __name__ == "__main__":
    start(main)
