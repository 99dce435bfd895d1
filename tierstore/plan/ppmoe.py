"""What a MoE layer costs with its experts over data ranks and over tensor-parallel ranks: Pipeline MoE's equations and ours.

The paper (section 3.2) compares *DPMoE*, experts over data-parallel ranks with an all-to-all there and another back, and
its own *PPMoE*, experts over tensor-parallel ranks that have the same tokens, with one all-reduce. S = b s tokens of width
h in 2 bytes, E experts, F floating point operations a second of a device, B bytes a second of a link, T tensor-parallel
ranks, K experts a token (1 in the paper).

Its equations are here as printed, and corrected, with what is wrong in their docstrings. Ours count the bytes that one
rank sends, which are those of ``CollectiveTraffic``, to the byte: links have different speeds, and bytes do not depend on
them. From both follows where each pays: with one group inside of a node (B_intra) and the other across nodes (B_inter),
the paper's all-reduce is faster where ``B_intra / B_inter > T / K``; rows that come back to every rank, as
``tierstore.moe.exchange`` sends them, where it is more than ``T / 2``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.train.config import TrainConfig
from tierstore.train.footprint import rank_tokens

_Equation = Callable[[int, int, float, float], float]

#: F, and B between and within nodes, as the paper has them below equations 2 and 5: V100 SXM2, InfiniBand, NVLink.
V100_FLOPS = 125e12
INFINIBAND = 12.5e9
NVLINK = 300e9
_GPUS_OF_A_NODE = 8


# The paper's equations --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ForwardTimes:
    """Table 1: a forward step of the 143B DPMoE model, milliseconds."""

    total: float = 7617
    moe: float = 6294
    first_all_to_all: float = 2566
    second_all_to_all: float = 2423
    gating: float = 156
    others: float = 1323

    @property
    def network(self) -> float:
        """Of the experts: what equation 1 (``t_forward = t_gating + t_1st + t_FFN + t_2nd``) leaves; the table omits it."""
        return self.moe - self.first_all_to_all - self.second_all_to_all - self.gating

    @property
    def ratio(self) -> float:
        """One all-to-all to the experts' products, which is what equation 2 predicts: 2.17."""
        return (self.first_all_to_all + self.second_all_to_all) / 2 / self.network


TABLE_1 = ForwardTimes()


def all_to_all_ratio_printed(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2, ``t_a2a / t_FFN = (E - 1) E F / (16 B h)``: 615 for the model of Table 1, where 2.17 was measured.

    Its all-to-all takes ``(N - 1)(t_s + m N / 2B)``: of the m bytes on a rank, m / N go to each other one, so that N / 2
    stands where 1 / N should, and the time is ``N**2 / 2`` times too long.
    """
    return (experts - 1) * experts * flops / (16 * bandwidth * width)


def all_to_all_ratio(experts: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 2 corrected: ``(E - 1) / E m / B`` of the ``m = 2 S h / E`` bytes on a rank, so ``(E - 1) F / (8 B h E)``."""
    return (experts - 1) / experts * flops / (8 * bandwidth * width)


def all_to_all_ratio_of_nodes(ranks: int, width: int, flops: float, node_bandwidth: float) -> float:
    """The same where the ``_GPUS_OF_A_NODE`` devices of a node share its link, and send only to other nodes over it.

    2.14 for the model of Table 1 on 64 ranks: next to the 2.17 that was measured, though no product runs at the peak.
    """
    outside = (ranks - _GPUS_OF_A_NODE) / ranks
    return outside * _GPUS_OF_A_NODE * flops / (8 * node_bandwidth * width)


def all_reduce_ratio_printed(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5, ``t_allreduce / t_cal = (T - 1) T F / (4 B h)``, of a feed-forward network over T ranks.

    Its all-reduce takes ``2 (N - 1)(t_s + m / B)``. A ring sends m / N in each of its 2 (N - 1) rounds, not m: the time is
    T times too long.
    """
    return (tensor - 1) * tensor * flops / (4 * bandwidth * width)


def all_reduce_ratio(tensor: int, width: int, flops: float, bandwidth: float) -> float:
    """Equation 5 corrected: ``(T - 1) F / (4 B h)``."""
    return (tensor - 1) * flops / (4 * bandwidth * width)


@dataclass(frozen=True, slots=True)
class Throughput:
    """A row of Table 2: tokens a second of a GPU, and the ratio to the base model as printed (0: none)."""

    model: str
    data: int
    tensor: int
    stages: int
    gpus: int
    tokens_per_s: int
    printed: float = 0.0


#: Table 2. Ratios are to the dense model of 0.3B with throughput 3244 and of 6.7B with 356.
TABLE_2 = (
    Throughput("0.3B Dense", 1, 8, 4, 32, 3244),
    Throughput("0.3B Dense", 4, 8, 1, 32, 4174),
    Throughput("0.3B Dense", 32, 1, 1, 32, 5120),
    Throughput("6.7B DPMoE", 32, 1, 1, 32, 2147, 66.2),
    Throughput("6.7B DPMoE", 4, 8, 1, 32, 218, 6.7),
    Throughput("6.7B PPMoE", 1, 8, 4, 32, 2708, 81.4),
    Throughput("6.7B Dense", 1, 8, 16, 128, 356),
    Throughput("6.7B Dense", 16, 8, 1, 128, 597),
    Throughput("6.7B Dense", 128, 1, 1, 128, 410),
    Throughput("143B DPMoE", 256, 1, 1, 256, 93, 26.1),
    Throughput("143B DPMoE", 128, 2, 1, 256, 183, 51.4),
    Throughput("143B DPMoE", 32, 8, 1, 256, 63, 17.7),
    Throughput("143B PPMoE", 1, 8, 16, 128, 323, 90.7),
)
_BASES: Mapping[str, int] = {"6.7B": 3244, "143B": 356}


def speed_ratio(row: Throughput) -> float:
    """Percent of the base model's throughput, from the table's own numbers.

    All but one are as printed: 2708 of 3244 are 83.5, printed 81.4 (and 2708 is 26.1% more than 2147, printed 24.6).
    """
    return 100 * row.tokens_per_s / _BASES[row.model.split()[0]]


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
    """What a plan says of a layer of experts over tensor-parallel ranks, beside the paper's figures for such a layer."""

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
    """Of a run of ``config`` on ``ranks`` ranks; None where none of them are tensor-parallel. ``flops`` and ``bandwidth``:
    F and B of the paper's equations. Raises ConfigError.
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
