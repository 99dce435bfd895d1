"""One rank of ``bench pipemoe``, in a process of its own.

The protocol is one JSON object a line. The parent sends any number of requests (``LayerRequest``, the same to all ranks),
then closes the pipe. Each is answered with one line (``LayerSamples``); a failure is ``{"error": text}``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tierstore.bench.pipemoe.device import DeviceSpeed, SleepingDevice, SleepingExperts
from tierstore.bench.processes.spawn import serve
from tierstore.links import CollectiveLink, LinkConfig, open_link
from tierstore.moe.computing import ExpertPass, Weighting, compute_experts
from tierstore.moe.config import ExpertShape, SaveActivations
from tierstore.moe.dispatch import dispatch
from tierstore.moe.exchange import ExchangedRows, rows_of
from tierstore.moe.pipelining import PipelineDegrees, Pipelining
from tierstore.moe.source import SourceSlot
from tierstore.parallel import Mesh
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.launching import launch
from tierstore.parallel.limited import LimitedGroup
from tierstore.timeline import open_timeline

#: Width of the experts' hidden layer: their real products shall cost little.
_HIDDEN = 4


@dataclass(frozen=True, kw_only=True)
class LayerRequest:
    """What to run: a layer of ``experts`` experts in all, of ``rows`` rows of ``width`` on every rank, in each of
    ``degrees`` (forward, backward) once a round. ``sizes``: instead, all-to-alls in which a rank sends so many bytes.
    """

    link: LinkConfig
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    rows: int = 0
    experts: int = 0
    width: int = 256
    seed: int = 0
    degrees: Sequence[tuple[int, int]] = ()
    rounds: int = 5
    sizes: Sequence[int] = ()
    timeline: str | None = None

    @staticmethod
    def of(request: Mapping[str, Any]) -> LayerRequest:
        """The inverse of ``asdict``."""
        given = dict(request)
        given["link"], given["speed"] = LinkConfig(**given["link"]), DeviceSpeed(**given["speed"])
        given["degrees"] = [(forward, backward) for forward, backward in given["degrees"]]
        return LayerRequest(**given)


@dataclass(frozen=True, kw_only=True)
class LayerSamples:
    """Seconds by degrees (or size), then by round. Of the slowest rank in a pass: rows that travel, rows that are computed,
    and experts.
    """

    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    travelling: int = 0
    computed: int = 0
    experts: int = 0

    @staticmethod
    def slowest(ranks: Sequence[LayerSamples]) -> LayerSamples:
        """A pass is over when all ranks have done it."""

        def greatest(name: str) -> list[list[float]]:
            each = (getattr(rank, name) for rank in ranks)
            return [[max(spent) for spent in zip(*rows, strict=True)] for rows in zip(*each, strict=True)]

        return replace(ranks[0], forward_s=greatest("forward_s"), backward_s=greatest("backward_s"))


class _Layer:
    """A layer's experts, and tokens for them: which expert each row goes to is drawn."""

    def __init__(self, asked: LayerRequest, mesh: Mesh, device: SleepingDevice, slot: SourceSlot) -> None:
        self._mesh, self._slot = mesh, slot
        self._shape = ExpertShape(asked.width, _HIDDEN)
        slot.target = SleepingExperts(self._shape, device)
        device.speed = asked.speed
        draw = torch.Generator().manual_seed(asked.seed)
        chosen_RT = torch.randint(asked.experts, (mesh.data.size, asked.rows), generator=draw)
        self._load_RE = torch.stack([own_T.bincount(minlength=asked.experts) for own_T in chosen_RT])
        own_T = chosen_RT[mesh.data.rank]
        self._plan = dispatch(own_T.unsqueeze(1), self._load_RE[mesh.data.rank])
        self._x_TD = torch.randn(asked.rows, asked.width, requires_grad=True)
        self._weight_TK = torch.ones(asked.rows, 1)
        self._grad_TD = torch.ones(asked.rows, asked.width)

    def rows(self) -> ExchangedRows:
        """The way of the rows, found anew in every pass, as a training step does."""
        found = rows_of(self._plan, self._load_RE, self._mesh, training=True)
        assert isinstance(found, ExchangedRows)
        return found

    def passes(self, degrees: PipelineDegrees) -> tuple[float, float]:
        """Seconds of one forward and one backward pass, which all ranks begin together."""
        self._slot.pipelining.degrees = degrees
        self._mesh.data.barrier()
        started = time.perf_counter()
        call = ExpertPass(
            0, self._shape, self._slot, self._plan, self.rows(), Weighting.BY_EXPERT, SaveActivations.SAVE
        )
        y_TD = compute_experts(self._x_TD, self._weight_TK, call)
        forward = time.perf_counter() - started
        self._mesh.data.barrier()
        started = time.perf_counter()
        torch.autograd.backward(y_TD, self._grad_TD)
        return forward, time.perf_counter() - started


def measure_layer(asked: LayerRequest, mesh: Mesh, device: SleepingDevice) -> LayerSamples:
    """The passes of ``asked`` in alternation: one round is one of each degree, in an order drawn anew, so that none has its
    place behind another's; the first round is not kept.
    """
    with open_timeline(None if asked.timeline is None else Path(asked.timeline)) as timeline:
        slot = SourceSlot(Pipelining(timeline))
        layer = _Layer(asked, mesh, device, slot)
        forward: list[list[float]] = [[] for _ in asked.degrees]
        backward: list[list[float]] = [[] for _ in asked.degrees]
        draw = random.Random(asked.seed)  # the same on all ranks
        places = range(len(asked.degrees))
        for number in range(asked.rounds + 1):
            for place in draw.sample(places, len(places)):
                spent = layer.passes(PipelineDegrees(*asked.degrees[place]))
                if number:
                    forward[place].append(spent[0])
                    backward[place].append(spent[1])
    most = layer.rows().most()
    return LayerSamples(
        forward_s=forward,
        backward_s=backward,
        travelling=most.travelling,
        computed=most.computed,
        experts=most.experts,
    )


def _measure_exchanges(asked: LayerRequest, mesh: Mesh) -> LayerSamples:
    """All-to-alls of each size, in turns."""
    group = mesh.data
    found: list[list[float]] = [[] for _ in asked.sizes]
    for number in range(asked.rounds + 1):
        for place, size in enumerate(asked.sizes):
            numel = max(size // 4 // (group.size - 1), 1)
            given, received = torch.zeros(group.size * numel), torch.empty(group.size * numel)
            splits = [numel] * group.size
            group.barrier()
            started = time.perf_counter()
            group.all_to_all(received, given, splits, splits).wait()
            if number:
                found[place].append(time.perf_counter() - started)
    return LayerSamples(forward_s=found, backward_s=[[] for _ in asked.sizes])


def _answers(requests: Iterator[Any]) -> Generator[Mapping[str, object]]:
    torch.set_num_threads(1)
    link, device = CollectiveLink(None), SleepingDevice()
    groups = partial(LimitedGroup, link=CollectiveLink(None), exchange=link)
    with launch(ParallelConfig(timeout_s=60.0), device="cpu", make_group=groups) as mesh:
        for request in requests:
            asked = LayerRequest.of(request)
            link.link = open_link(asked.link)
            try:
                found = _measure_exchanges(asked, mesh) if asked.sizes else measure_layer(asked, mesh, device)
            finally:
                link.link = None
            yield asdict(found)


if __name__ == "__main__":
    serve(_answers)
