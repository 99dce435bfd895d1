"""The papers' formulas, applied to a model: SE-MoE's storage, its ring memory against sparse expert loading, and Pipeline
MoE's expert layers over tensor-parallel ranks. Each section gives the paper's equations and the errors in their print.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tierstore.config import check_least
from tierstore.errors import ConfigError
from tierstore.machine_profile import Cost, Profile
from tierstore.model.architecture import Architecture
from tierstore.model.config import ModelConfig
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import rank_tokens

# SE-MoE, section 2.1: storage -------------------------------------------------------------------------------
#
# The text prints equation 2, P = S + D, but not equation 1. The text before it gives, for N devices (nodes of eight GPUs
# by default) of sizes M_GPU, M_CPU and M_SSD:
#
# * GPU: dense states in forward, backward and update. The text prints 2D + 2D + 2D + 2D + 4D = 16D. Its own list is fp16
#   parameters 2, fp16 gradients 2, fp32 masters 4, momentum 4 and variance 4 bytes, so it must read 2D + 2D + 4D + 4D + 4D
#   (as printed the sum is 12 D). With ZeRO-3 each byte is on one GPU only, so the total counts once over all devices.
#   In addition, for one MoE layer at a time, fp16 parameters and gradients of the activated experts: 4 alpha S / L.
# * CPU: a cache for the states of the activated share, 16 alpha S.
# * SSD: masters, momentum and variance of all experts, 12 S. The fp16 parameter follows from the master and the gradient
#   lives for one step, so neither is stored.
#
# "The relationship between each storage device and the states" must then be that each total fits on N devices:
#
#     16 D + 4 alpha S / L <= N M_GPU,    16 alpha S <= N M_CPU,    12 S <= N M_SSD        (1)
#
# and equation 2 gives the model size for the largest S and D.


def paper_bytes(model: Architecture, alpha: float) -> dict[str, int]:
    """The left-hand sides of equation 1: ``gpu_bytes``, ``cpu_bytes`` and ``ssd_bytes`` of all devices together.

    ``alpha``: the share of sparse parameters that is activated.
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"alpha: expected a share from 0 to 1, got {alpha}")
    layers = max(len(model.moe_layers), 1)
    return {
        "gpu_bytes": 16 * model.dense + round(4 * alpha * model.sparse / layers),
        "cpu_bytes": round(16 * alpha * model.sparse),
        "ssd_bytes": 12 * model.sparse,
    }


# SE-MoE, section 3.2: ring memory against sparse loading ----------------------------------------------------
#
# A pass of T tokens computes N layers of E experts; each token goes to k of them. With an even router a layer reaches
#
#     d(T) = E (1 - (1 - k / E)^T)
#
# experts, and computes for C seconds. Loading one expert to the device takes b: the slower of its copy and its disk share,
# (1 - h) of a read if the host cache holds the fraction h of all experts.
#
# * Ring of K layers: all experts of a layer are loaded while earlier layers compute, so a pass takes N max(C, E b). With
#   K = 1 loading and computation do not overlap: N (C + E b). With K = N nothing is loaded: N C.
# * Sparse: the device holds the fraction a of the d(T) experts. Of the rest, the fraction g was predicted in time and is
#   loaded during the previous layer; the pass waits for the others. With m = (1 - a) d(T): N (max(C, g m b) + (1 - g) m b).


def distinct_experts(experts: int, top_k: int, tokens: int) -> float:
    """The expected number of a layer's ``experts`` that ``tokens`` reach."""
    if not 1 <= top_k <= experts:
        raise ConfigError(f"top_k: expected 1 to {experts}, got {top_k}")
    return float(experts * (1.0 - (1.0 - top_k / experts) ** tokens))


@dataclass(frozen=True, kw_only=True)
class ServedLayers:
    """The MoE layers of a model. ``expert_bytes``: bytes of one expert on the device; ``dense_numel``: a layer's parameters
    outside its experts.
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
    """The number of experts that ``device`` and ``host`` hold, and of layers in the ring (0: none fits)."""

    device: int
    host: int
    ring_layers: int


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """The next pass, of ``tokens`` tokens, and ratios measured on similar earlier passes (None: not yet measured).

    ``reached``: experts that a layer reached, over those an even router would reach; may exceed 1. ``resident``: fraction of
    the requested experts that are on the device. ``guessed``: fraction of the others that are in flight.
    """

    tokens: int
    reached: float | None = None
    resident: float | None = None
    guessed: float | None = None


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of a forward pass. ``ring_s`` is None if the device cannot hold a layer."""

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
    """Seconds of a pass with a ring and without. ``copy``: cost of copying to the device (default: the profile's)."""
    count, tokens = model.layers, facts.tokens
    distinct = distinct_experts(model.experts, model.top_k, tokens) * (facts.reached or 1.0)
    distinct = min(distinct, float(model.experts))
    compute_s = (
        profile.dense_flops.seconds(2.0 * model.dense_numel * tokens)
        + distinct * profile.expert_flops.latency_s
        + 2.0 * model.expert_numel * tokens * model.top_k / profile.expert_flops.per_s
    )
    missed = 1.0 - min(1.0, sizes.host / model.total)
    copy_s = (copy or profile.copy).seconds(model.expert_bytes)
    load_s = max(copy_s, missed * profile.disk_read.seconds(model.expert_bytes))  # of one expert
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


def _ring_s(model: ServedLayers, ring_layers: int, compute_s: float, layer_s: float) -> float | None:
    if ring_layers < 1:
        return None
    if ring_layers >= model.layers:
        return model.layers * compute_s
    each = compute_s + layer_s if ring_layers == 1 else max(compute_s, layer_s)
    return model.layers * each


# Pipeline MoE: experts over tensor-parallel ranks -----------------------------------------------------------
#
# Section 3.2 compares DPMoE (experts over data-parallel ranks, two all-to-alls) with its own PPMoE (experts over
# tensor-parallel ranks that have the same tokens, one all-reduce). S = b s tokens of width h in 2 bytes, E experts, F
# floating point operations per second of a device, B bytes per second of a link, T tensor-parallel ranks, K experts per
# token (1 in the paper).
#
# The equations are given as printed and corrected. Ours count the bytes that one rank sends, equal to CollectiveTraffic to
# the byte. With the tensor-parallel group inside a node (B_intra) and the all-to-alls across nodes (B_inter), the paper's
# all-reduce is faster if B_intra / B_inter > T / K; rows sent back to every rank, as in tierstore.moe.exchange, are faster
# if it exceeds T / 2.


_Equation = Callable[[int, int, float, float], float]


def all_to_all_ratio_printed(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2, ``t_a2a / t_FFN = (E - 1) E F / (16 B h)``: 615 for the model of Table 1, where 2.17 was measured.

    Its all-to-all takes ``(N - 1)(t_s + m N / 2B)``. Of the m bytes on a rank only m / N go to each other rank, so N / 2
    should be 1 / N: the time is ``N**2 / 2`` times too long.
    """
    return (experts - 1) * experts * flops / (16 * bandwidth * width)


def all_to_all_ratio(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2 corrected: ``(E - 1) / E m / B`` of the ``m = 2 S h / E`` bytes on a rank, so ``(E - 1) F / (8 B h E)``."""
    return (experts - 1) / experts * flops / (8 * bandwidth * width)


def all_reduce_ratio_printed(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5, ``t_allreduce / t_cal = (T - 1) T F / (4 B h)``, for a feed-forward network over T ranks.

    Its all-reduce takes ``2 (N - 1)(t_s + m / B)``. A ring sends m / N, not m, in each of its 2 (N - 1) rounds, so the time
    is T times too long.
    """
    return (tensor - 1) * tensor * flops / (4 * bandwidth * width)


def all_reduce_ratio(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5 corrected: ``(T - 1) F / (4 B h)``."""
    return (tensor - 1) * flops / (4 * bandwidth * width)


# Ours -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowBytes:
    """Bytes that one rank of a group of ``ranks`` sends on average for a MoE layer's rows, in the forward pass and again in
    the backward pass. The group has ``tokens`` tokens of ``width`` elements of ``itemsize`` bytes, with ``top_k`` experts.
    """

    tokens: int
    width: int
    itemsize: int
    ranks: int
    top_k: int

    def __post_init__(self) -> None:
        check_least(self, 1, "tokens", "width", "itemsize", "ranks", "top_k")

    @property
    def _elsewhere(self) -> float:
        return (self.ranks - 1) / self.ranks * self.tokens * self.width * self.itemsize

    @property
    def all_reduce(self) -> float:
        """The paper's all-reduce of combined results: ``2 (T - 1) / T S h``, a reduce-scatter and an all-gather."""
        return 2 * self._elsewhere

    @property
    def rows(self) -> float:
        """Our exchange, which sends the rows of a rank's experts to all others: ``(T - 1) / T K S h``."""
        return self.top_k * self._elsewhere

    @property
    def all_to_all(self) -> float:
        """Two all-to-alls with S / T of the tokens on each rank: ``2 (T - 1) / T**2 K S h``."""
        return 2 * self.top_k * self._elsewhere / self.ranks

    @property
    def all_reduce_crossover(self) -> float:
        """How many times faster the group's links must be than those of two all-to-alls between as many ranks, for the
        all-reduce to take as long: ``T / K``.
        """
        return self.all_reduce / self.all_to_all

    @property
    def rows_crossover(self) -> float:
        """The same ratio for rows: ``T / 2``."""
        return self.rows / self.all_to_all


def division_bytes(*, tokens: int, width: int, itemsize: int, ranks: int, pairs: int) -> float:
    """Bytes that one of ``ranks`` tensor-parallel ranks sends for one divided block in a forward and a backward pass: an
    all-reduce after each divided pair of products and one before it, of ``tokens`` by ``width`` elements. That is
    ``4 (T - 1) / T S h`` per pair.
    """
    return 4 * pairs * (ranks - 1) / ranks * tokens * width * itemsize


@dataclass(frozen=True, kw_only=True)
class TensorCosts:
    """An expert layer over tensor-parallel ranks: our bytes (``attention``: ``division_bytes``) and the paper's figures."""

    rows: RowBytes
    attention: float
    experts: int
    flops: float
    bandwidth: float

    def as_json(self) -> dict[str, object]:
        """The costs as JSON, with units in the keys."""
        rows = self.rows
        return {
            "tensor_ranks_count": rows.ranks,
            "all_reduce_bytes": rows.all_reduce,
            "rows_bytes": rows.rows,
            "all_to_all_bytes": rows.all_to_all,
            "attention_bytes": self.attention,
            "all_reduce_crossover_ratio": rows.all_reduce_crossover,
            "rows_crossover_ratio": rows.rows_crossover,
            "paper_equation_5_printed_ratio": self._ratio(all_reduce_ratio_printed, self.rows.ranks),
            "paper_equation_5_corrected_ratio": self._ratio(all_reduce_ratio, self.rows.ranks),
            "paper_equation_2_printed_ratio": self._ratio(all_to_all_ratio_printed, self.experts),
            "paper_equation_2_corrected_ratio": self._ratio(all_to_all_ratio, self.experts),
        }

    def _ratio(self, equation: _Equation, among: int) -> float:
        return equation(among, self.rows.width, self.flops, self.bandwidth)

    def lines(self) -> list[str]:
        """The costs as text."""
        rows = self.rows
        return [
            f"an expert layer over {rows.ranks} tensor-parallel ranks sends, per pass and rank: rows "
            f"{rows.rows / 2**20:.2f} MiB, the paper's all-reduce {rows.all_reduce / 2**20:.2f} MiB, two all-to-alls of "
            f"as many data ranks {rows.all_to_all / 2**20:.2f} MiB",
            f"it pays if links within the group are more than {rows.rows_crossover:.3g} times as fast as the links "
            f"of the all-to-alls (the paper's all-reduce: {rows.all_reduce_crossover:.3g})",
            f"communication / computation by Pipeline MoE's equations: all-reduce of {rows.ranks} "
            f"{self._ratio(all_reduce_ratio, rows.ranks):.3g} (as printed "
            f"{self._ratio(all_reduce_ratio_printed, rows.ranks):.3g}), all-to-all of {self.experts} experts "
            f"{self._ratio(all_to_all_ratio, self.experts):.3g} (as printed "
            f"{self._ratio(all_to_all_ratio_printed, self.experts):.3g})",
        ]


def tensor_costs(
    config: TrainConfig, top_k: int, *, ranks: int, flops: float, bandwidth: float
) -> TensorCosts | None:
    """The costs of a run of ``config`` on ``ranks`` ranks; None without tensor parallelism. ``flops`` and ``bandwidth``: F
    and B in the paper's equations. Raises ConfigError.
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
    # The attention of an imported model is not divided.
    pairs = 1 if isinstance(model, ModelConfig) else 0
    sizes = {"tokens": tokens, "width": model.d_model, "itemsize": itemsize, "ranks": parallel.tensor}
    return TensorCosts(
        rows=RowBytes(**sizes, top_k=top_k),
        attention=division_bytes(**sizes, pairs=pairs),
        experts=model.experts,
        flops=flops,
        bandwidth=bandwidth,
    )
