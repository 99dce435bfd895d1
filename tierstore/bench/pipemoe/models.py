"""The costs of a machine as its ranks measure them, and what they predict for a layer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from tierstore.bench.pipemoe.cases import ROW_BYTES
from tierstore.bench.pipemoe.rank import LayerSamples
from tierstore.machine_profile import Cost, fit_cost
from tierstore.parallel.pipeline_degree import (
    Degree,
    LayerPass,
    PipelineCosts,
    Share,
    backward_pass,
    forward_pass,
    pass_seconds,
    worthwhile_degree,
)

#: Bytes of a row's weight, which travels beside its gradient.
_WEIGHT_BYTES = 4


@dataclass(frozen=True, slots=True)
class FittedPass:
    """Seconds of computation of one direction: ``rows`` of the slowest rank, and what every chunk adds."""

    rows: Cost
    chunk_s: float


def fit_pass(samples: dict[int, list[list[float]]], degrees: tuple[int, int]) -> FittedPass:
    """``samples``: by computed rows, then of ``degrees`` (one chunk, and several), the seconds without a limited link."""
    alone = {rows: statistics.median(found[0]) for rows, found in samples.items()}
    more = degrees[1] - degrees[0]
    added = [(statistics.median(found[1]) - alone[rows]) / more for rows, found in samples.items()]
    chunk_s = max(statistics.median(added), 0.0)
    # A pass in one chunk has that once too.
    return FittedPass(fit_cost(list(alone), [max(spent - chunk_s, 0.0) for spent in alone.values()]), chunk_s)


@dataclass(frozen=True, slots=True)
class FittedMachine:
    """All-to-alls by the bytes that a rank sends, and both directions of a layer's computation."""

    exchange: Cost
    forward: FittedPass
    backward: FittedPass

    def forward_of(self, layer: LayerSamples) -> PredictedPass:
        """What a forward pass with the loads of ``layer`` takes."""
        sent = forward_pass(layer.travelling * ROW_BYTES, 0.0)
        return self._predicted(sent, self.forward, layer.computed)

    def backward_of(self, layer: LayerSamples) -> PredictedPass:
        """What its backward pass takes: gradients and weights go to the experts and come back."""
        sent = backward_pass(
            layer.travelling * ROW_BYTES, 0.0, weights_bytes=layer.travelling * _WEIGHT_BYTES
        )
        return self._predicted(sent, self.backward, layer.computed)

    def _predicted(self, sent: LayerPass, computed: FittedPass, rows: int) -> PredictedPass:
        costs = PipelineCosts(self.exchange.latency_s, 1 / self.exchange.per_s, computed.chunk_s, 1.0)
        work = LayerPass(sent.dispatch, Share(1, computed.rows.seconds(rows)), sent.combine)
        return PredictedPass(costs, work)


@dataclass(frozen=True, slots=True)
class PredictedPass:
    """One pass by its model."""

    costs: PipelineCosts
    work: LayerPass

    def auto(self, most: int) -> Degree:
        """AUTO's choice at the beginning of a run."""
        return worthwhile_degree(self.costs, self.work, present=1, most=most)

    def seconds(self, degree: int) -> float:
        return pass_seconds(self.costs, self.work, degree)

    def network_s(self, degree: int) -> float:
        """For how long the network is busy."""
        sent, back = self.work.dispatch, self.work.combine
        starts = degree * self.costs.alpha_a * (sent.starts + back.starts)
        return starts + self.costs.beta_a * (sent.amount + back.amount)

    def device_s(self, degree: int) -> float:
        """For how long the device is busy."""
        return degree * self.costs.alpha_e + self.costs.beta_e * self.work.experts.amount

    @property
    def longer_s(self) -> float:
        """For how long the busier of the two is busy in a pass of one chunk."""
        return max(self.network_s(1), self.device_s(1))

    def exposed_s(self, degree: int) -> float:
        """What cannot overlap with it: the first chunk's dispatch, the last one's combine, the starts of more chunks."""
        return self.seconds(degree) - self.longer_s
