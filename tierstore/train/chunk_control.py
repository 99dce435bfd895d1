"""The number of chunks of passes over experts (PipeMoE): as configured, or chosen for the forward and the backward pass.

AUTO weighs the cost of another chunk against the time that it hides (``tierstore.parallel.chunk_degree``). The costs
of messages and products are probed when the session is opened, or read from the profile of the machine
(``parallel.profile``). Rows in transit are counted from commit to commit; before the first commit they are derived from
the configuration, with tokens spread evenly. The choice is made only at commits, from numbers that all ranks have agreed
on, and is committed with the state, so that a resumed run continues with it. The number of chunks changes neither bits
nor accesses to the store.

More chunks than a rank owns experts divide each expert's rows into parts, which changes bits. AUTO considers them only as
``auto-split``: then it chooses once, before the first step, and every resumed run keeps that choice.

Tensor-parallel ranks have the rows of all their tokens: no rows are sent to the experts, and results come back in chunks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch

from tierstore.accelerator import synchronize
from tierstore.decision import Decision
from tierstore.errors import ConfigError, DataError
from tierstore.links import LinkConfig
from tierstore.machine_profile import Profile, fit_cost, load_profile, over_link
from tierstore.model.spec import BuiltInSpec
from tierstore.model.store_schema import TrainState
from tierstore.moe.config import ExpertShape
from tierstore.moe.exchange import PassLoads
from tierstore.moe.experts import Workspace, forward_expert
from tierstore.moe.source import ChunkDegrees, Chunking
from tierstore.parallel import Mesh
from tierstore.parallel.chunk_degree import (
    ChunkCosts,
    Inputs,
    LayerPass,
    Share,
    WeightGradients,
    backward_pass,
    chosen_degrees,
    forward_pass,
    pass_seconds,
)
from tierstore.parallel.collectives import uncounted
from tierstore.parallel.config import AUTO_SPLIT, fewest_experts
from tierstore.train.config import TrainConfig
from tierstore.units import format_seconds


def most_chunks(config: TrainConfig, mesh: Mesh) -> int:
    """The most chunks that a run's passes may have. Raises ConfigError if the configuration requests too many."""
    return config.parallel.most_chunks(experts=config.model.experts, sharing=mesh.expert.size)


def check_chunks(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ConfigError if passes cannot have the requested number of chunks, or AUTO's profile lacks the costs it
    needs."""
    most, parallel = most_chunks(config, mesh), config.parallel
    if parallel.profile is not None and parallel.auto_degree and most > 1:
        read_profile(parallel.profile, mesh.expert.size)


def even_loads(config: TrainConfig, mesh: Mesh) -> PassLoads:
    """The load of a pass if the router spreads the tokens evenly."""
    sharing = mesh.expert.size
    rows = config.tokens_per_micro_batch // mesh.data.size * config.model.architecture.top_k
    owned = -(-config.model.experts // sharing)
    computed = rows / mesh.tensor.size  # tensor-parallel ranks have the same tokens
    return PassLoads(rows * (sharing - 1) / sharing, computed, min(owned, computed))


class ChunkControl:
    """Chooses the degrees of ``chunking`` when the session is opened, and at every commit."""

    def __init__(self, config: TrainConfig, mesh: Mesh, chunking: Chunking) -> None:
        """A collective; without a choice to make, nothing is probed or read. Raises ConfigError, PeerError."""
        self._config = config
        self._mesh = mesh
        self._chunking = chunking
        self._most = most_chunks(config, mesh)
        self._owned = fewest_experts(config.model.experts, mesh.expert.size)
        #: Whether a choice is permanent, because it may change bits.
        self._split = config.parallel.pipeline_degree == AUTO_SPLIT
        self._auto = "auto-split" if self._split else "auto"
        self._costs: LayerCosts | None = None
        self._costs_from: str | None = None
        self._loads = even_loads(config, mesh)
        self._note: Callable[[str], None] = lambda text: None
        self._noted = ChunkDegrees()
        #: The degrees until the next commit, the best ones without the cap of ``most``, and the source of the costs; None
        #: if no rows are exchanged.
        self.chosen: Decision[ChunkDegrees] | None = None
        auto = config.parallel.auto_degree
        exchanges = mesh.expert.size > 1 and bool(config.model.moe_layers)
        if auto and exchanges and self._most > 1:
            profile = config.parallel.profile
            if profile is None:
                self._costs, self._costs_from = self._probed(), "probed"
            else:
                self._costs = profiled(mesh, config.model.expert_shape, profile, config.links.rows)
                self._costs_from = f"of {profile}"
        elif exchanges:
            reason = "as configured"
            if auto:
                reason = "auto: some rank has at most one expert of a layer; auto-split would divide it"
            self._take(self._degrees(self._most, self._most), reason)

    def begin(self, state: TrainState, note: Callable[[str], None]) -> None:
        """Begins at ``state``, which may hold an earlier choice. ``note`` receives each choice, for the trace."""
        self._note = note
        if self._costs is not None and state.chunks is None:
            self._choose(f"{self._auto}: tokens spread evenly")
        elif self._costs is not None and state.chunks is not None:
            forward, backward = (min(max(degree, 1), self._most) for degree in state.chunks)
            self._take(self._degrees(forward, backward), f"{self._auto}: taken up from the last commit")
        self._note_choice(state.position)

    def at_commit(self, position: int) -> list[int] | None:
        """Chooses again from the counts since the last commit, unless the choice is permanent; a collective. Returns the
        choice to store in this commit, after ``position`` steps.
        """
        if self._costs is None:
            return None
        means = torch.tensor(astuple(self._chunking.mean_loads()), dtype=torch.float64)
        self._mesh.world.max(means)
        if means[1] > 0 and not self._split:
            self._loads = PassLoads(*means.tolist())
            self._choose("auto: rows since the last commit")
            self._note_choice(position)
        degrees = self._chunking.degrees
        return [degrees.forward, degrees.backward]

    # The choice ---------------------------------------------------------------------------------------------

    def _probed(self) -> LayerCosts:
        model, even = self._config.model, self._loads
        found = probe(
            self._mesh,
            model.expert_shape,
            model.compute_dtype.torch,
            row_bytes=model.d_model * model.compute_dtype.itemsize,
            rows_to_each=int(even.travelling) // (self._mesh.expert.size - 1),
            rows_of_expert=int(even.computed / max(even.experts, 1)),
        )
        # A further part of an expert starts its products once more.
        return replace(found, chunk=found.chunk + found.expert) if self._split else found

    def _choose(self, reason: str) -> None:
        assert self._costs is not None
        present = self._chunking.degrees
        passes = self._priced(self._costs)
        found = chosen_degrees(
            passes, present=(present.forward, present.backward), owned=self._owned, most=self._most
        )
        degrees = self._degrees(*(one.degree for one in found))
        wanted = ChunkDegrees(*(one.wanted for one in found))
        whole = sum(pass_seconds(costs, work, 1) for costs, work in passes)
        chunked = sum(one.seconds for one in found)
        estimate = f"a layer's passes take {format_seconds(chunked)}"
        if chunked < whole:
            estimate += f", {format_seconds(whole)} in one chunk"
        self._take(degrees, f"{reason}, costs {self._costs_from}; {estimate}", wanted)

    def _priced(self, costs: LayerCosts) -> list[tuple[ChunkCosts, LayerPass]]:
        """The costs of a layer's forward and backward pass, and their parts. Without costs of its own, a backward pass
        counts as two forward ones.
        """
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
        if self._mesh.tensor.size > 1:  # rows are local already
            forward, backward = (replace(one, dispatch=Share(0, 0)) for one in (forward, backward))
        priced = ChunkCosts(costs.message, costs.byte, costs.chunk, 1.0)
        if (own := costs.backward) is None:
            return [(priced, forward), (priced, backward)]
        row = own.row + (0.0 if kept else own.row_again)
        backward = replace(backward, experts=Share(1, loads.experts * own.expert + loads.computed * row))
        return [(priced, forward), (replace(priced, alpha_e=own.expert), backward)]

    def _degrees(self, forward: int, backward: int) -> ChunkDegrees:
        """The numbers of chunks, with the parts of each expert that the larger one needs: the same in both passes, so that
        they round alike.
        """
        return ChunkDegrees(forward, backward, -(-max(forward, backward) // self._owned))

    def _note_choice(self, position: int) -> None:
        degrees = self._chunking.degrees
        if self.chosen is not None and degrees != self._noted:
            self._noted = degrees
            self._note(f"step {position}: chunks: {degrees}")

    def _take(self, degrees: ChunkDegrees, reason: str, wanted: ChunkDegrees | None = None) -> None:
        self._chunking.degrees = degrees
        self._chunking.timeline.count(
            "chunks of a pass", {"forward": degrees.forward, "backward": degrees.backward}
        )
        wanted, most = wanted or degrees, self._most
        facts = {"wanted": wanted, "most": most, "reason": reason, "costs": self._costs_from}
        if max(wanted.forward, wanted.backward) > most:
            reason += (
                f"; {wanted.forward} and {wanted.backward} would be better, and a rank owns {self._owned} "
                f"expert{'s' * (self._owned > 1)} of a layer"
                f"{'' if self._split else ', which auto-split would divide'}"
            )
        self.chosen = Decision("chunks of tokens on their way to experts", degrees, reason, facts)


# What messages and products cost ----------------------------------------------------------------------------
#
# All-to-alls and expert products are timed on this machine and its links by a short probe when a session is opened, or
# taken from the profile of the machine that ``tierstore bench machine`` has written.
#
# All ranks end with the same numbers: the largest of any rank, since a pass takes as long as its slowest rank. They probe
# together; each number comes from medians over a few rounds of a small and a large case. The probe's own messages are not
# counted as traffic.


_ROUNDS = 5
#: Bytes to each other rank in the large exchange, at most.
_LARGE_BYTES = 2 << 20
#: Rows of an expert in the large product, at most.
_LARGE_ROWS = 256
#: A product that takes this long is measured only once.
_SLOW_S = 0.2


@dataclass(frozen=True, slots=True)
class BackwardCosts:
    """Seconds of an expert's backward pass (``expert``), which each further chunk costs again; of each of its rows
    (``row``); and of recomputing the activation's input, for each row (``row_again``).
    """

    expert: float
    row: float
    row_again: float


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Seconds: to start an all-to-all (``message``), and for each byte that a rank sends in it (``byte``); of the
    computing thread for each further chunk (``chunk``); of an expert's forward pass (``expert``), and of each of its rows
    (``row``). ``backward``: None if it counts as two forward passes.
    """

    message: float
    byte: float
    chunk: float
    expert: float
    row: float
    backward: BackwardCosts | None = None


def probe(
    mesh: Mesh,
    shape: ExpertShape,
    dtype: torch.dtype,
    *,
    row_bytes: int,
    rows_to_each: int,
    rows_of_expert: int,
) -> LayerCosts:
    """The costs of passes over experts of ``shape`` that send ``rows_to_each`` other rank and compute ``rows_of_expert``; a
    collective of all ranks. Raises PeerError.
    """
    with uncounted(mesh.expert, *mesh.exchange.groups):
        message, byte, chunk = _exchanges(mesh, row_bytes * max(rows_to_each, 1))
    expert, row = _products(mesh.device, shape, dtype, rows_of_expert)
    found = torch.tensor([message, byte, chunk, expert, row], dtype=torch.float64)
    mesh.world.max(found)
    return LayerCosts(*found.tolist())


def read_profile(path: Path, sharing: int) -> Profile:
    """The profile at ``path``. Raises ConfigError if it lacks the costs for choosing the passes of ``sharing`` ranks."""
    try:
        profile = load_profile(path)
    except OSError as error:
        raise ConfigError(f"parallel.profile: {path}: {error.strerror or error}") from error
    except DataError as error:
        raise ConfigError(f"parallel.profile: {error}") from error
    if profile.expert_forward is None or profile.expert_backward is None or not profile.exchanges:
        raise ConfigError(
            f"parallel.profile: {path}: expected costs of all-to-alls by ranks (exchanges) and of experts (expert_forward, "
            "expert_backward), as `tierstore bench machine` measures them"
        )
    if sharing not in profile.exchanges:
        raise ConfigError(
            f"parallel.profile: {path}: expected all-to-alls of {sharing} ranks, which share the experts, got those of "
            f"{', '.join(str(count) for count in sorted(profile.exchanges))}: `tierstore bench machine --ranks {sharing}`"
        )
    return profile


def profiled(mesh: Mesh, shape: ExpertShape, path: Path, link: LinkConfig) -> LayerCosts:
    """The costs in the profile at ``path`` of passes over experts of ``shape``, whose rows go over ``link``; a collective
    of all ranks, each of which may read its own file. Raises ConfigError, PeerError.
    """
    profile = read_profile(path, mesh.expert.size)
    exchange = over_link(profile.exchanges[mesh.expert.size], link)
    forward, backward = profile.expert_forward, profile.expert_backward
    assert forward is not None
    assert backward is not None
    flops = 2 * shape.numel
    again = 2 * shape.inner_rows * shape.d_model
    found = torch.tensor(
        [
            exchange.latency_s,
            1 / exchange.per_s,
            forward.latency_s,
            flops / forward.per_s,
            backward.latency_s,
            2 * flops / backward.per_s,
            again / backward.per_s,
        ],
        dtype=torch.float64,
    )
    mesh.world.max(found)
    message, byte, expert, row, *back = found.tolist()
    return LayerCosts(message, byte, expert, expert, row, BackwardCosts(*back))


def _exchanges(mesh: Mesh, wanted_bytes: int) -> tuple[float, float, float]:
    """Seconds to start an exchange, for each byte sent, and of the issuing thread for a chunk."""
    group, device = mesh.expert, mesh.device
    cases = []
    for nbytes in (64, max(min(wanted_bytes, _LARGE_BYTES), 64 << 4)):
        rows = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=device)
        cases.append((nbytes, torch.empty_like(rows), rows, torch.full((group.size, group.size), nbytes)))
    sent: list[float] = []
    spent: list[float] = []
    issued: list[float] = []
    for _ in range(_ROUNDS):
        for nbytes, out, rows, rows_SS in cases:
            group.barrier()
            started = time.perf_counter()
            work = mesh.exchange.all_to_all(out, rows, rows_SS)
            issued.append(time.perf_counter() - started)
            work.wait()
            synchronize(device)
            spent.append(time.perf_counter() - started)
            sent.append(nbytes * (group.size - 1))
    cost = fit_cost(sent, spent)
    # A chunk is issued twice: its rows, and their results.
    return cost.latency_s, 1 / cost.per_s, 2 * statistics.median(issued)


def _products(device: torch.device, shape: ExpertShape, dtype: torch.dtype, rows: int) -> tuple[float, float]:
    """Seconds of an expert's forward pass, and of each of its rows."""
    large = max(min(rows, _LARGE_ROWS), 2)
    weights = torch.zeros(shape.numel, dtype=dtype, device=device)
    x_MD = torch.zeros(large, shape.d_model, dtype=dtype, device=device)
    work = Workspace(shape, large, x_MD)
    inner_MP, out_MD = x_MD.new_empty(large, shape.inner_rows), torch.empty_like(x_MD)

    def compute(count: int) -> float:
        def once() -> None:
            forward_expert(shape, weights, x_MD[:count], inner_MP[:count], out_MD[:count], work)

        return _median_s(once, device)

    few = max(large // 4, 1)
    cost = fit_cost((few, large), (compute(few), compute(large)))
    return cost.latency_s, 1 / cost.per_s


def _median_s(call: Callable[[], None], device: torch.device) -> float:
    """The median of a few calls after a warm-up call; the warm-up call alone if it is slow."""
    times: list[float] = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - started)
        if times[0] > _SLOW_S:
            return times[0]
    return statistics.median(times[1:])
