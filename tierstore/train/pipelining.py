"""In how many chunks the passes over experts go (PipeMoE): as configured, or chosen for the forward and the backward pass.

AUTO weighs what a further chunk costs against what it hides (``tierstore.parallel.pipeline_degree``). What messages and
products cost is probed when the session is opened, or read from the profile of the machine (``parallel.profile``); what
travels is counted from commit to commit, and before the first of them taken from the configuration, with tokens spread
evenly. A choice is made at commits alone, of numbers that all ranks have agreed on. It is part of what is committed, so that
a resumed run goes on with it. The number of chunks changes no bit and no access to the store.

Tensor-parallel ranks have the rows of all their tokens: nothing travels to the experts, and results come back in chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tierstore.decision import Decision
from tierstore.model.spec import BuiltInSpec
from tierstore.model.store_schema import TrainState
from tierstore.moe.source import PipelineDegrees, Pipelining
from tierstore.parallel import Mesh
from tierstore.parallel.config import AUTO_DEGREE
from tierstore.parallel.pipeline_degree import (
    Inputs,
    LayerPass,
    PipelineCosts,
    Share,
    WeightGradients,
    backward_pass,
    forward_pass,
    pass_seconds,
    worthwhile_degree,
)
from tierstore.train.config import TrainConfig
from tierstore.train.probing import LayerCosts, ProbeSizes, probe, profiled, read_profile
from tierstore.units import format_seconds


@dataclass(frozen=True, slots=True)
class PassLoads:
    """Means of one pass over a layer, of the rank that has most to do: rows that travel, rows that are computed, experts
    that have any.
    """

    travelling: float
    computed: float
    experts: float


def most_chunks(config: TrainConfig, mesh: Mesh) -> int:
    """The most chunks that a run's passes may come to. Raises ConfigError where more are asked for than the fewest experts
    that any rank owns.
    """
    return config.parallel.most_chunks(experts=config.model.experts, sharing=mesh.expert.size)


def check_chunks(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ConfigError where passes cannot go in as many chunks as are asked for, or the profile that AUTO is to choose by
    lacks what it needs.
    """
    most, parallel = most_chunks(config, mesh), config.parallel
    if parallel.profile is not None and parallel.pipeline_degree == AUTO_DEGREE and most > 1:
        read_profile(parallel.profile, mesh.expert.size)


def even_loads(config: TrainConfig, mesh: Mesh) -> PassLoads:
    """What a pass has to do where the router spreads the tokens evenly."""
    sharing = mesh.expert.size
    rows = config.tokens_per_micro_batch // mesh.data.size * config.model.architecture.top_k
    owned = -(-config.model.experts // sharing)
    computed = rows / mesh.tensor.size  # tensor-parallel ranks have the same tokens
    return PassLoads(rows * (sharing - 1) / sharing, computed, min(owned, computed))


class PipelineControl:
    """Chooses the degrees of ``pipelining``, when the session is opened and at every commit."""

    def __init__(self, config: TrainConfig, mesh: Mesh, pipelining: Pipelining) -> None:
        """A collective; nothing is probed or read where nothing is to be chosen. Raises ConfigError, PeerError."""
        self._config = config
        self._mesh = mesh
        self._pipelining = pipelining
        self._most = most_chunks(config, mesh)
        self._costs: LayerCosts | None = None
        self._costs_from: str | None = None
        self._loads = even_loads(config, mesh)
        self._note: Callable[[str], None] = lambda text: None
        self._noted = PipelineDegrees()
        #: The degrees until the next commit, what would be best without the cap of ``most``, and where the costs are from;
        #: None where no rows travel.
        self.chosen: Decision[PipelineDegrees] | None = None
        auto = config.parallel.pipeline_degree == AUTO_DEGREE
        if auto and self._most > 1:
            profile = config.parallel.profile
            self._costs = self._probed() if profile is None else self._profiled(profile)
            self._costs_from = "probed" if profile is None else f"of {profile}"
        elif mesh.expert.size > 1:
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

    def _profiled(self, path: Path) -> LayerCosts:
        config = self._config
        return profiled(self._mesh, config.model.expert_shape, path, config.links.rows)

    def _choose(self, reason: str) -> None:
        assert self._costs is not None
        present = self._pipelining.degrees
        passes = self._priced(self._costs)
        found = [
            worthwhile_degree(costs, work, present=now, most=self._most)
            for (costs, work), now in zip(passes, (present.forward, present.backward), strict=True)
        ]
        degrees = PipelineDegrees(*(one.degree for one in found))
        wanted = PipelineDegrees(*(one.wanted for one in found))
        whole = sum(pass_seconds(costs, work, 1) for costs, work in passes)
        chunked = sum(one.seconds for one in found)
        estimate = f"a layer's passes take {format_seconds(chunked)}"
        if chunked < whole:
            estimate += f", {format_seconds(whole)} in one chunk"
        self._take(degrees, f"{reason}, costs {self._costs_from}; {estimate}", wanted)

    def _priced(self, costs: LayerCosts) -> list[tuple[PipelineCosts, LayerPass]]:
        """A layer's forward and backward pass, and what each is made of."""
        forward, backward = self._passes(costs)
        priced = PipelineCosts(costs.message, costs.byte, costs.chunk, 1.0)
        own, loads = costs.backward, self._loads
        if own is None:
            return [(priced, forward), (priced, backward)]
        row = own.row + (0.0 if self._config.keeps_activations else own.row_again)
        seconds = loads.experts * own.expert + loads.computed * row
        return [
            (priced, forward),
            (replace(priced, alpha_e=own.expert), replace(backward, experts=Share(1, seconds))),
        ]

    def _passes(self, costs: LayerCosts) -> tuple[LayerPass, LayerPass]:
        """A layer's forward and backward pass, of seconds of products; a backward pass computes as two forward ones."""
        model, loads, kept = self._config.model, self._loads, self._config.keeps_activations
        rows_bytes = loads.travelling * model.d_model * model.compute_dtype.itemsize
        seconds = loads.experts * costs.expert + loads.computed * costs.row
        built_in = isinstance(self._config.spec, BuiltInSpec)
        backward = backward_pass(
            rows_bytes,
            seconds,
            weights_bytes=loads.travelling * torch.float32.itemsize,
            inputs=Inputs.SAVED if kept else Inputs.SENT_AGAIN,
            gradients=WeightGradients.AT_EXPERTS if built_in else WeightGradients.AT_TOKENS,
            again=0.0 if kept else seconds,
        )
        forward = forward_pass(rows_bytes, seconds)
        if self._mesh.tensor.size > 1:  # rows are there already
            return replace(forward, dispatch=Share(0, 0)), replace(backward, dispatch=Share(0, 0))
        return forward, backward

    def _tell(self, position: int) -> None:
        degrees = self._pipelining.degrees
        if self.chosen is not None and degrees != self._noted:
            self._noted = degrees
            self._note(f"step {position}: chunks: {degrees}")

    def _take(self, degrees: PipelineDegrees, reason: str, wanted: PipelineDegrees | None = None) -> None:
        self._pipelining.degrees = degrees
        self._pipelining.timeline.count(
            "chunks of a pass", {"forward": degrees.forward, "backward": degrees.backward}
        )
        wanted, most = wanted or degrees, self._most
        facts = {"wanted": wanted, "most": most, "reason": reason, "costs": self._costs_from}
        if max(wanted.forward, wanted.backward) > most:
            reason += (
                f"; {wanted.forward} and {wanted.backward} would be better, and a rank owns {most} "
                f"expert{'s' * (most > 1)} of a layer"
            )
        self.chosen = Decision("chunks of tokens on their way to experts", degrees, reason, facts)
