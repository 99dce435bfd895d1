"""What the papers' formulas say of a model: SE-MoE's storage, its ring memory against chosen experts, and Pipeline MoE's
layers of experts over tensor-parallel ranks. Each section gives its paper's equations, and what is wrong with them in print.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.machine_profile import Cost, Profile
from tierstore.model.architecture import Architecture
from tierstore.model.config import ModelConfig
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import rank_tokens

# SE-MoE, section 2.1: storage -------------------------------------------------------------------------------
#
# The text keeps equation 2, P = S + D, and loses equation 1. What precedes it gives, for N devices (nodes of eight GPUs
# by default) of sizes M_GPU, M_CPU and M_SSD:
#
# * GPU: dense states in forward, backward and update. The text prints 2D + 2D + 2D + 2D + 4D = 16D. Its own list is fp16
#   parameters 2, fp16 gradients 2, fp32 masters 4, momentum 4 and variance 4 bytes, so it must read 2D + 2D + 4D + 4D + 4D
#   (as printed the sum is 12 D). With ZeRO-3 each byte is on one GPU alone, so the total counts once over all devices.
#   Besides, of one MoE layer at a time, fp16 parameters and gradients of the activated experts: 4 alpha S / L.
# * CPU: a cache of the states of the activated share, 16 alpha S.
# * SSD: masters, momentum and variance of all experts, 12 S. The fp16 parameter follows from the master and the gradient
#   lives for one step: neither is stored.
#
# "The relationship between each storage device and the states" can then only be that each total fits on N devices:
#
#     16 D + 4 alpha S / L <= N M_GPU,    16 alpha S <= N M_CPU,    12 S <= N M_SSD        (1)
#
# and equation 2 is the scale that the largest S and D reach.


@dataclass(frozen=True)
class PaperBytes:
    """The left sides of equation 1: bytes over all devices."""

    gpu: int
    cpu: int
    ssd: int


def paper_bytes(model: Architecture, alpha: float) -> PaperBytes:
    """Bytes by the paper's formulas; ``alpha`` is the share of sparse parameters that is activated."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha: expected a share from 0 to 1, got {alpha}")
    layers = max(len(model.moe_layers), 1)
    return PaperBytes(
        gpu=16 * model.dense + round(4 * alpha * model.sparse / layers),
        cpu=round(16 * alpha * model.sparse),
        ssd=12 * model.sparse,
    )


# SE-MoE, section 3.2: ring memory against chosen experts ----------------------------------------------------
#
# A pass of T tokens computes N layers of E experts, of which a token goes to k. Where its router is even, a layer reaches
#
#     d(T) = E (1 - (1 - k / E)^T)
#
# experts, and computes for C seconds. Bringing one expert to the device takes b: the slower of its copy and of its share
# of the disk, (1 - h) of a read, where the host cache holds the part h of all experts.
#
# * Ring of K layers: a layer's experts are all loaded while earlier layers compute, so a pass takes N max(C, E b). With
#   K = 1 nothing computes meanwhile: N (C + E b). With K = N nothing moves: N C.
# * Sparse: of the d(T) experts the device has the part a. Of the rest, the part g was guessed in time and is loaded during
#   the layer before; the others are waited for. With m = (1 - a) d(T): N (max(C, g m b) + (1 - g) m b).


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """The expected number of a layer's ``experts`` that ``tokens`` reach."""
    if not 1 <= top_k <= experts:
        raise ConfigError(f"top_k: expected 1 to {experts}, got {top_k}")
    return float(experts * (1.0 - (1.0 - top_k / experts) ** tokens))


@dataclass(frozen=True, kw_only=True)
class ServedLayers:
    """The MoE layers of a model. ``expert_bytes``: of one expert on the device; ``dense_numel``: a layer's other
    parameters.
    """

    layers: int
    experts: int
    top_k: int
    expert_numel: int
    expert_bytes: int
    dense_numel: int = 0

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts


@dataclass(frozen=True, kw_only=True)
class ExpertMemorySizes:
    """Experts that ``device`` and ``host`` hold, and the layers of the ring (0: none fits)."""

    device: int
    host: int
    ring_layers: int


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """A coming pass of ``tokens``, and shares that earlier passes like it measured (None: not yet).

    ``reached``: experts that a layer reached, over those of an even router; it may exceed 1. ``resident``: of the requested
    experts, those on the device. ``guessed``: of the others, those in flight.
    """

    tokens: int
    reached: float | None = None
    resident: float | None = None
    guessed: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a forward pass. ``ring_s`` is None where the device cannot hold a layer."""

    distinct: float
    compute_s: float
    ring_s: float | None
    sparse_s: float

    @property
    def ring_is_faster(self) -> bool:
        return self.ring_s is not None and self.ring_s <= self.sparse_s


def pass_times(
    model: ServedLayers,
    sizes: ExpertMemorySizes,
    facts: PassFacts,
    profile: Profile,
    copy: Cost | None = None,
) -> PassTimes:
    """Seconds of a pass with a ring and without. ``copy``: of one expert to the device (default: the profile's)."""
    count, tokens = model.layers, facts.tokens
    distinct = distinct_experts(model.experts, model.top_k, tokens) * (facts.reached or 1.0)
    distinct = min(distinct, float(model.experts))
    compute_s = (
        profile.dense_flops.seconds(2.0 * model.dense_numel * tokens)
        + distinct * profile.expert_flops.latency_s
        + 2.0 * model.expert_numel * tokens * model.top_k / profile.expert_flops.per_s
    )
    load_s = _load_s(model, sizes, profile, copy or profile.copy)
    resident = min(1.0, sizes.device / model.total) if facts.resident is None else facts.resident
    missing_s = (1.0 - resident) * distinct * load_s
    guessed = facts.guessed or 0.0
    sparse_s = count * (max(compute_s, guessed * missing_s) + (1.0 - guessed) * missing_s)
    return PassTimes(
        distinct=distinct,
        compute_s=count * compute_s,
        ring_s=_ring_s(model, sizes.ring_layers, compute_s, model.experts * load_s),
        sparse_s=sparse_s,
    )


def _load_s(model: ServedLayers, sizes: ExpertMemorySizes, profile: Profile, copy: Cost) -> float:
    """Of one expert."""
    missed = 1.0 - min(1.0, sizes.host / model.total)
    return max(copy.seconds(model.expert_bytes), missed * profile.disk_read.seconds(model.expert_bytes))


def _ring_s(model: ServedLayers, ring_layers: int, compute_s: float, layer_s: float) -> float | None:
    if ring_layers < 1:
        return None
    if ring_layers >= model.layers:
        return model.layers * compute_s
    each = compute_s + layer_s if ring_layers == 1 else max(compute_s, layer_s)
    return model.layers * each


# Pipeline MoE: experts over tensor-parallel ranks -----------------------------------------------------------
#
# Section 3.2 compares DPMoE, experts over data-parallel ranks with two all-to-alls, and its own PPMoE, experts over
# tensor-parallel ranks that have the same tokens, with one all-reduce. S = b s tokens of width h in 2 bytes, E experts, F
# floating point operations a second of a device, B bytes a second of a link, T tensor-parallel ranks, K experts a token
# (1 in the paper).
#
# Its equations are here as printed, and corrected. Ours count the bytes that one rank sends, those of CollectiveTraffic to
# the byte. From both follows where each pays: with one group inside a node (B_intra) and the other across nodes (B_inter),
# the paper's all-reduce is faster where B_intra / B_inter > T / K; rows that come back to every rank, as
# tierstore.moe.exchange sends them, where it is more than T / 2.


_Equation = Callable[[int, int, float, float], float]


def all_to_all_ratio_printed(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2, ``t_a2a / t_FFN = (E - 1) E F / (16 B h)``: 615 for the model of Table 1, where 2.17 was measured.

    Its all-to-all takes ``(N - 1)(t_s + m N / 2B)``: of the m bytes on a rank, m / N go to each other one, so that N / 2
    stands where 1 / N should, and the time is ``N**2 / 2`` times too long.
    """
    return (experts - 1) * experts * flops / (16 * bandwidth * width)


def all_to_all_ratio(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2 corrected: ``(E - 1) / E m / B`` of the ``m = 2 S h / E`` bytes on a rank, so ``(E - 1) F / (8 B h E)``."""
    return (experts - 1) / experts * flops / (8 * bandwidth * width)


def all_reduce_ratio_printed(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5, ``t_allreduce / t_cal = (T - 1) T F / (4 B h)``, of a feed-forward network over T ranks.

    Its all-reduce takes ``2 (N - 1)(t_s + m / B)``. A ring sends m / N in each of its 2 (N - 1) rounds, not m: the time is
    T times too long.
    """
    return (tensor - 1) * tensor * flops / (4 * bandwidth * width)


def all_reduce_ratio(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5 corrected: ``(T - 1) F / (4 B h)``."""
    return (tensor - 1) * flops / (4 * bandwidth * width)


# Ours -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes that one rank sends for the rows of a MoE layer in a forward pass, and again in a backward one, on average over
    a group of ``ranks``: S ``tokens`` of the group, of ``width`` elements of ``itemsize`` bytes, ``top_k`` experts each.
    """

    tokens: int
    width: int
    itemsize: int
    ranks: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("tokens", "width", "itemsize", "ranks", "top_k"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def _elsewhere(self) -> float:
        return (self.ranks - 1) / self.ranks * self.tokens * self.width * self.itemsize

    @property
    def all_reduce(self) -> float:
        """Of what each rank has combined (the paper): ``2 (T - 1) / T S h``, a reduction and a gathering."""
        return 2 * self._elsewhere

    @property
    def rows(self) -> float:
        """Of the rows of each rank's experts, to all others (ours): ``(T - 1) / T K S h``."""
        return self.top_k * self._elsewhere

    @property
    def all_to_all(self) -> float:
        """Of two all-to-alls, where each rank has S / T of the tokens: ``2 (T - 1) / T**2 K S h``."""
        return 2 * self.top_k * self._elsewhere / self.ranks

    @property
    def all_reduce_crossover(self) -> float:
        """How many times as fast the group's own links must be for the all-reduce to take as long as two all-to-alls of a
        group of the same size: ``T / K``.
        """
        return self.all_reduce / self.all_to_all

    @property
    def rows_crossover(self) -> float:
        """The same of rows: ``T / 2``."""
        return self.rows / self.all_to_all


@dataclass(frozen=True, kw_only=True)
class DivisionBytes:
    """Bytes that one rank sends for one divided block of tensor-parallel ranks in a forward and a backward pass: an
    all-reduce behind each divided pair of products and one before it, of S ``tokens`` by ``width``.
    """

    tokens: int
    width: int
    itemsize: int
    ranks: int
    pairs: int

    @property
    def both_passes(self) -> float:
        """``4 (T - 1) / T S h`` a pair."""
        return 4 * self.pairs * (self.ranks - 1) / self.ranks * self.tokens * self.width * self.itemsize


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """A layer of experts over tensor-parallel ranks: our bytes beside the paper's figures."""

    rows: RowBytes
    attention: DivisionBytes
    flops: float
    bandwidth: float

    def as_json(self) -> dict[str, object]:
        """Numbers by keys that say their unit."""
        rows = self.rows
        return {
            "tensor_ranks_count": rows.ranks,
            "all_reduce_bytes": rows.all_reduce,
            "rows_bytes": rows.rows,
            "all_to_all_bytes": rows.all_to_all,
            "attention_bytes": self.attention.both_passes,
            "all_reduce_crossover_ratio": rows.all_reduce_crossover,
            "rows_crossover_ratio": rows.rows_crossover,
            "paper_equation_5_printed_ratio": self._ratio(all_reduce_ratio_printed),
            "paper_equation_5_corrected_ratio": self._ratio(all_reduce_ratio),
            "paper_equation_2_printed_ratio": self._ratio(all_to_all_ratio_printed),
            "paper_equation_2_corrected_ratio": self._ratio(all_to_all_ratio),
        }

    def _ratio(self, equation: _Equation) -> float:
        return equation(self.rows.ranks, self.rows.width, self.flops, self.bandwidth)

    def lines(self) -> list[str]:
        """The same for people."""
        rows = self.rows
        return [
            f"a layer of experts over {rows.ranks} tensor-parallel ranks, a pass and rank: rows "
            f"{rows.rows / 2**20:.2f} MiB, the paper's all-reduce {rows.all_reduce / 2**20:.2f} MiB, two all-to-alls of "
            f"as many data ranks {rows.all_to_all / 2**20:.2f} MiB",
            f"so it pays where links within the group are more than {rows.rows_crossover:.3g} times as fast as those "
            f"that all-to-alls would take (the paper's all-reduce: {rows.all_reduce_crossover:.3g})",
            f"communication to computation by Pipeline MoE's equations: all-reduce {self._ratio(all_reduce_ratio):.3g} "
            f"(as printed {self._ratio(all_reduce_ratio_printed):.3g}), all-to-all {self._ratio(all_to_all_ratio):.3g} "
            f"(as printed {self._ratio(all_to_all_ratio_printed):.3g})",
        ]


def tensor_costs(
    config: TrainConfig, top_k: int, *, ranks: int, flops: float, bandwidth: float
) -> TensorCosts | None:
    """For a run of ``config`` on ``ranks`` ranks; None without tensor parallelism. ``flops`` and ``bandwidth``: F and B
    of the paper's equations. Raises ConfigError.
    """
    parallel = config.parallel
    if parallel.tensor == 1:
        return None
    data, more = divmod(ranks, parallel.tensor * parallel.stages)
    if more:
        raise ConfigError(
            f"parallel.tensor: expected {parallel.tensor} x {parallel.stages} stages to divide the {ranks} ranks"
        )
    tokens, model = rank_tokens(config, data), config.model
    itemsize = model.compute_dtype.itemsize
    # A wrapped model's attention is not divided.
    pairs = 1 if isinstance(model, ModelConfig) else 0
    sizes = {"tokens": tokens, "width": model.d_model, "itemsize": itemsize, "ranks": parallel.tensor}
    return TensorCosts(
        rows=RowBytes(**sizes, top_k=top_k),
        attention=DivisionBytes(**sizes, pairs=pairs),
        flops=flops,
        bandwidth=bandwidth,
    )
