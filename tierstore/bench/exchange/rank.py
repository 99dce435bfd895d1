"""One rank of ``bench exchange``, in a process of its own.

The protocol is one JSON object a line. The parent sends any number of ``LinkRequest`` (the same to all ranks), then closes
the pipe. Each is answered with one ``LinkAnswer``; a failure is ``{"error": text}``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from tierstore.bench.processes.spawn import serve
from tierstore.config import from_dict
from tierstore.links import CollectiveLink, LinkConfig, open_link
from tierstore.parallel import Collective, Mesh
from tierstore.parallel.choosing import measured_model
from tierstore.parallel.config import ExchangeMode, ParallelConfig
from tierstore.parallel.hierarchical import Exchange, FlatExchange, HierarchicalExchange
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import LimitedGroup
from tierstore.parallel.nodes import NodeGrid

_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """Links, and messages to exchange over them: ``probe_bytes`` for the model, ``message_bytes`` to be measured."""

    within: LinkConfig = field(default_factory=LinkConfig)
    between: LinkConfig = field(default_factory=LinkConfig)
    probe_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    rounds: int


@dataclass(frozen=True, kw_only=True)
class SizeSamples:
    """Seconds of an exchange by round, for the slowest rank; ``again_s``: of the flat one, behind the other. Messages to
    other nodes of one exchange, of one rank.
    """

    flat_s: Sequence[float]
    hierarchical_s: Sequence[float]
    again_s: Sequence[float]
    flat_messages: int
    hierarchical_messages: int


@dataclass(frozen=True, kw_only=True)
class LinkAnswer:
    """``model``: the (start, seconds a byte) of ``ExchangeModel``'s lines; ``sizes``: by message, as ``SizeSamples``."""

    model: Mapping[str, Sequence[float]]
    sizes: Sequence[Mapping[str, Any]]


def _measure(asked: LinkRequest, mesh: Mesh, grid: NodeGrid) -> LinkAnswer:
    flat, hierarchical = FlatExchange(mesh.expert), mesh.exchange
    assert isinstance(hierarchical, HierarchicalExchange)
    model = measured_model(mesh, grid, hierarchical, sizes=asked.probe_bytes)
    lines = {"flat": model.flat, "rail": model.rail, "hierarchical": model.hierarchical}
    return LinkAnswer(
        model={name: (line.start_s, line.byte_s) for name, line in lines.items()},
        sizes=[
            asdict(_samples(mesh, flat, hierarchical, nbytes, asked.rounds)) for nbytes in asked.message_bytes
        ],
    )


def _samples(mesh: Mesh, flat: Exchange, hierarchical: Exchange, nbytes: int, rounds: int) -> SizeSamples:
    ways = {"flat": flat, "hierarchical": hierarchical, "again": flat}
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
    times = dict(zip(ways, seconds[:, 1:].tolist(), strict=True))  # the first one finds everything cold
    return SizeSamples(
        flat_s=times["flat"],
        hierarchical_s=times["hierarchical"],
        again_s=times["again"],
        flat_messages=messages["flat"],
        hierarchical_messages=messages["hierarchical"],
    )


def _answers(each: int, requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    torch.set_num_threads(1)
    within, between = CollectiveLink(None), CollectiveLink(None)
    groups = partial(LimitedGroup, link=CollectiveLink(None), exchange=within, node=between)
    config = ParallelConfig(exchange=ExchangeMode.HIERARCHICAL, node_ranks=each, timeout_s=_TIMEOUT_S)
    with launch(config, device="cpu", make_group=groups) as mesh:
        grid = NodeGrid(mesh.world.size // each, each)
        for request in requests:
            asked = from_dict(LinkRequest, request)
            mesh.world.barrier()
            within.link, between.link = open_link(asked.within), open_link(asked.between)
            found = _measure(asked, mesh, grid)
            within.link = between.link = None
            yield asdict(found)


if __name__ == "__main__":
    serve(partial(_answers, int(sys.argv[1])))
