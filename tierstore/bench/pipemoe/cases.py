"""The layers of ``bench pipemoe``: those that are scored, and others to fit its models on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tierstore.bench.pipemoe.device import DeviceSpeed
from tierstore.bench.pipemoe.rank import LayerRequest
from tierstore.links import LinkConfig

#: Experts that a rank owns. Their loads are drawn, so that chunks are not quite equal.
EXPERTS = 12
#: Bytes of one row.
ROW_BYTES = 1024
#: Chunks that are measured.
DEGREES = (1, 2, 3, 4, 6, 8)
#: Rows of a rank: of layers that are scored, and of those that models are fitted on.
ROWS, FITTED_ROWS = (512, 1024, 1536), (384, 768, 1280)
#: Seconds of an all-to-all of the middle size, but for its start: passes take 60 to 300 ms, of which 5% are several times
#: what two cores that drive four ranks vary by.
_EXCHANGE_S = 0.027
#: Starts of an all-to-all: as between machines, and as where each message is dear.
_LATENCIES_S = (1e-3, 9e-3)
_RATIOS = (0.2, 0.5, 1.0, 2.0, 5.0)
_RANKS = (2, 4)
_EXPERT_START_S = 1.5e-4


@dataclass(frozen=True, slots=True)
class EmulatedMachine:
    """``ranks`` on a network whose all-to-alls start in ``latency_s``, with devices on which the experts of a layer of the
    middle size take 1 / ``ratio`` times as long as its dispatch and combine. ``slowdown``: how often as long as usual
    bytes and rows take.
    """

    ranks: int
    latency_s: float
    ratio: float
    slowdown: float = 1.0

    @property
    def link(self) -> LinkConfig:
        away = ROWS[1] * ROW_BYTES * (self.ranks - 1) / self.ranks
        return LinkConfig(bandwidth=round(away / (_EXCHANGE_S * self.slowdown)), latency=self.latency_s)

    @property
    def speed(self) -> DeviceSpeed:
        seconds = 2 * _EXCHANGE_S * self.slowdown / self.ratio - EXPERTS * _EXPERT_START_S
        return DeviceSpeed(_EXPERT_START_S, seconds / ROWS[1])

    def layer(self, rows: int, seed: int) -> LayerRequest:
        """A layer of ``rows`` rows on every rank, whose experts' loads are drawn by ``seed``; no passes of it yet."""
        return LayerRequest(
            link=self.link,
            speed=self.speed,
            rows=rows,
            experts=EXPERTS * self.ranks,
            width=ROW_BYTES // 4,
            seed=seed,
        )


@dataclass(frozen=True, slots=True)
class ScoredLayer:
    """A layer whose passes are measured in all numbers of chunks. ``seed``: of its experts' loads."""

    machine: EmulatedMachine
    rows: int
    seed: int


def scored_layers(slowdown: float = 1.0) -> Iterator[ScoredLayer]:
    """60: 2 numbers of ranks, 2 starts, 5 ratios, 3 sizes. ``slowdown`` times as long as usual."""
    all_of_them = itertools.product(_RANKS, _LATENCIES_S, _RATIOS, ROWS)
    for seed, (ranks, latency_s, ratio, rows) in enumerate(all_of_them):
        machine = EmulatedMachine(ranks, latency_s * slowdown, ratio, slowdown)
        yield ScoredLayer(machine, rows, seed)


def spread(layers: list[ScoredLayer], count: int) -> list[ScoredLayer]:
    """``count`` of ``layers``, evenly over the list; all where there are no more."""
    if count >= len(layers):
        return layers
    return [layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count)]
