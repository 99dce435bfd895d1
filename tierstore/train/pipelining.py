"""In how many chunks the passes over experts go (PipeMoE): as configured, or chosen for the forward and the backward pass.

AUTO weighs what a further chunk costs against what it hides (``tierstore.parallel.pipeline_degree``). What messages and
products cost is probed when the session is opened; what travels is counted from commit to commit, and before the first of
them taken from the configuration, with tokens spread evenly. A choice is made at commits alone, of numbers that all ranks
have agreed on. It is part of what is committed, so that a resumed run goes on with it. The number of chunks changes no bit
and no access to the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.moe.config import SaveActivations
from tierstore.moe.pipelining import PipelineDegrees, Pipelining
from tierstore.parallel import Mesh
from tierstore.parallel.config import AUTO_DEGREE
from tierstore.parallel.pipeline_degree import (
    Inputs,
    LayerPass,
    PipelineCosts,
    WeightGradients,
    backward_pass,
    best_degree,
    forward_pass,
    pass_seconds,
)
from tierstore.train.config import TrainConfig
from tierstore.train.probing import LayerCosts, ProbeSizes, probe
from tierstore.train.stages.spec import whole_model
from tierstore.train.state import TrainState
from tierstore.units import format_seconds

#: Another number of chunks than the present one, at first 1, is taken up where it is faster by at least this share: what is
#: probed and counted varies.
_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class PassLoads:
    """Means of one pass over a layer, of the rank that has most to do: rows that travel, rows that are computed, experts
    that have any.
    """

    travelling: float
    computed: float
    experts: float


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """The degrees of a run from one commit to the next. ``wanted``: what would be best without the cap of ``most``."""

    degrees: PipelineDegrees
    wanted: PipelineDegrees
    most: int
    reason: str

    def describe(self) -> str:
        """One line."""
        forward, backward = self.degrees.forward, self.degrees.backward
        capped = max(self.wanted.forward, self.wanted.backward) > self.most
        limit = (
            f"; {self.wanted.forward} and {self.wanted.backward} would be better, and a rank owns {self.most} "
            f"expert{'s' * (self.most > 1)} of a layer"
            if capped
            else ""
        )
        return f"chunks of tokens on their way to experts: {forward} forward, {backward} backward ({self.reason}{limit})"

    def as_json(self) -> dict[str, object]:
        return {
            "forward": self.degrees.forward,
            "backward": self.degrees.backward,
            "most": self.most,
            "reason": self.reason,
        }


def most_chunks(config: TrainConfig, mesh: Mesh) -> int:
    """The most chunks that a run's passes may come to. Raises ConfigError where more are asked for than the fewest experts
    that any rank owns.
    """
    experts, sharing = config.model.experts, mesh.expert.size
    most = config.parallel.most_chunks(experts=experts, sharing=sharing)
    fewest = experts // sharing
    if 1 < most > fewest:
        raise ConfigError(
            f"parallel.pipeline_degree: expected auto or at most {max(fewest, 1)}, the fewest of the {experts} experts of a "
            f"layer that any of {sharing} ranks owns, got {most}"
        )
    return most


def even_loads(config: TrainConfig, mesh: Mesh) -> PassLoads:
    """What a pass has to do where the router spreads the tokens evenly."""
    sharing = mesh.expert.size
    rows = config.tokens_per_micro_batch // mesh.data.size * config.model.architecture.top_k
    owned = -(-config.model.experts // sharing)
    return PassLoads(rows * (sharing - 1) / sharing, rows, min(owned, rows))


class PipelineControl:
    """Chooses the degrees of ``pipelining``, when the session is opened and at every commit."""

    def __init__(self, config: TrainConfig, mesh: Mesh, pipelining: Pipelining) -> None:
        """A collective; nothing is probed where nothing is to be chosen. Raises ConfigError, PeerError."""
        self._config = config
        self._mesh = mesh
        self._pipelining = pipelining
        self._most = most_chunks(config, mesh)
        self._costs: LayerCosts | None = None
        self._loads = even_loads(config, mesh)
        self._note: Callable[[str], None] = lambda text: None
        self._noted = PipelineDegrees()
        #: None where no rows travel.
        self.chosen: PipelineChoice | None = None
        auto = config.parallel.pipeline_degree == AUTO_DEGREE
        if auto and self._most > 1:
            self._costs = self._probed()
        elif mesh.expert.size > 1 and mesh.tensor.size == 1:
            reason = "auto: there is a rank with one expert of a layer, or none" if auto else "as configured"
            self._take(PipelineDegrees(self._most, self._most), reason)

    def begin(self, state: TrainState, note: Callable[[str], None]) -> None:
        """The session begins at ``state``, which may hold an earlier choice. ``note`` is told of each, for the trace."""
        self._note = note
        if self._costs is not None and state.chunks is None:
            self._choose("auto: tokens spread evenly")
        elif self._costs is not None and state.chunks is not None:
            forward, backward = (min(max(degree, 1), self._most) for degree in state.chunks)
            self._take(PipelineDegrees(forward, backward), "auto: taken up from the last commit")
        self._tell(state.position)

    def at_commit(self, position: int) -> list[int] | None:
        """Chooses again, of what was counted since the last commit; a collective. Returns what this commit, after
        ``position`` steps, is to hold.
        """
        if self._costs is None:
            return None
        counted, self._pipelining.loads = self._pipelining.loads, type(self._pipelining.loads)()
        means = torch.zeros(3, dtype=torch.float64)
        if counted.passes:
            means += torch.tensor([counted.travelling, counted.computed, counted.experts]) / counted.passes
        self._mesh.world.max(means)
        if means[1] > 0:
            self._loads = PassLoads(*means.tolist())
            self._choose("auto: rows since the last commit")
            self._tell(position)
        degrees = self._pipelining.degrees
        return [degrees.forward, degrees.backward]

    # The choice ---------------------------------------------------------------------------------------------

    def _probed(self) -> LayerCosts:
        model, even = self._config.model, self._loads
        sizes = ProbeSizes(
            row_bytes=model.d_model * model.compute_dtype.itemsize,
            rows_to_each=int(even.travelling) // (self._mesh.expert.size - 1),
            rows_of_expert=int(even.computed / max(even.experts, 1)),
        )
        return probe(self._mesh, model.expert_shape, model.compute_dtype.torch, sizes)

    def _choose(self, reason: str) -> None:
        assert self._costs is not None
        costs = PipelineCosts(self._costs.message, self._costs.byte, self._costs.chunk, 1.0)
        passes = self._passes(self._costs)
        present = self._pipelining.degrees
        found = []
        for work, now in zip(passes, (present.forward, present.backward), strict=True):
            best = best_degree(costs, work, most=self._most)
            keep = pass_seconds(costs, work, now) <= best.seconds * (1 + _WORTH)
            found.append((now if keep else best.degree, best.wanted))
        degrees, wanted = (PipelineDegrees(*each) for each in zip(*found, strict=True))
        whole = sum(pass_seconds(costs, work, 1) for work in passes)
        chunked = sum(
            pass_seconds(costs, work, degree)
            for work, degree in zip(passes, (degrees.forward, degrees.backward), strict=True)
        )
        estimate = f"a layer's passes take {format_seconds(chunked)}"
        if chunked < whole:
            estimate += f", {format_seconds(whole)} in one chunk"
        self._take(degrees, f"{reason}; {estimate}", wanted)

    def _passes(self, costs: LayerCosts) -> tuple[LayerPass, LayerPass]:
        """A layer's forward and backward pass, of seconds of products."""
        config, model, loads = self._config, self._config.model, self._loads
        rows_bytes = loads.travelling * model.d_model * model.compute_dtype.itemsize
        seconds = loads.experts * costs.expert + loads.computed * costs.row
        kept = model.expert_activations is SaveActivations.SAVE and not config.data.layer_major
        built_in = isinstance(whole_model(model), ModelConfig)
        backward = backward_pass(
            rows_bytes,
            seconds,
            weights_bytes=loads.travelling * torch.float32.itemsize,
            inputs=Inputs.SAVED if kept else Inputs.SENT_AGAIN,
            gradients=WeightGradients.AT_EXPERTS if built_in else WeightGradients.AT_TOKENS,
            again=0.0 if kept else seconds,
        )
        return forward_pass(rows_bytes, seconds), backward

    def _tell(self, position: int) -> None:
        degrees = self._pipelining.degrees
        if self.chosen is not None and degrees != self._noted:
            self._noted = degrees
            self._note(f"step {position}: chunks: {degrees.forward} forward, {degrees.backward} backward")

    def _take(self, degrees: PipelineDegrees, reason: str, wanted: PipelineDegrees | None = None) -> None:
        self._pipelining.degrees = degrees
        self._pipelining.timeline.count(
            "chunks of a pass", {"forward": degrees.forward, "backward": degrees.backward}
        )
        self.chosen = PipelineChoice(degrees, wanted or degrees, self._most, reason)
