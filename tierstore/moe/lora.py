"""Low-rank adaptation (LoRA, Hu et al. 2021) of experts: its configuration, and the layout of a pair.

The expert is frozen; beside each of its two projections a pair of narrow matrices is trained:
``y = W x + scale * B (A x)``. The pairs of one expert are one flat fp32 tensor, as stored in their record:
``[inner A r x D | inner B P x r | down A r x F | down B D x r]``, with D the width of the model, F that of the expert, P
what feeds the activation (gate and up where there are both, in the columns' order) and r the rank. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from tierstore.config import check_least, key
from tierstore.errors import ConfigError
from tierstore.moe.config import ExpertShape

if TYPE_CHECKING:
    from torch import Tensor


class LoraTargets(Enum):
    """Which layers get pairs."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adaptation instead of full training: everything but the pairs is frozen. Disabled with ``rank`` 0.
    ``alpha``: the pairs' output is scaled by ``alpha / rank``; 0 means twice the rank. ``modules``: names of attention's
    linear layers that get a pair, as peft's ``target_modules``; empty: all. ``seed``: of the initial values.
    """

    rank: int = key(0, "rank of the pairs (0: train everything)")
    alpha: float = key(0.0, "pairs are scaled by alpha / rank (0: twice the rank)")
    targets: LoraTargets = key(LoraTargets.BOTH, "layers that get pairs")
    modules: tuple[str, ...] = key((), "linear layers of attention with pairs (empty: all)")
    seed: int = key(0, "seed of the pairs' initial values")

    def __post_init__(self) -> None:
        check_least(self, 0, "rank", "alpha", table="lora.")
        if self.modules and not self.attention:
            raise ConfigError(f"lora.modules: {self.modules} have no effect with targets = experts")

    @property
    def enabled(self) -> bool:
        return self.rank > 0

    @property
    def attention(self) -> bool:
        """Whether attention gets pairs."""
        return self.targets is not LoraTargets.EXPERTS

    @property
    def experts(self) -> bool:
        """Whether experts get pairs."""
        return self.targets is not LoraTargets.ATTENTION

    @property
    def scaled_alpha(self) -> float:
        """``alpha``, with 0 resolved to twice the rank."""
        return self.alpha or 2.0 * self.rank


@dataclass(frozen=True, slots=True)
class PairViews:
    """Views into a flat pair."""

    inner_a: Tensor
    inner_b: Tensor
    down_a: Tensor
    down_b: Tensor


@dataclass(frozen=True, slots=True)
class PairShape:
    """The pairs of one expert of shape ``expert``; their output is scaled by ``alpha / rank``."""

    expert: ExpertShape
    rank: int
    alpha: float

    @classmethod
    def of(cls, expert: ExpertShape, config: LoraConfig) -> PairShape:
        return cls(expert, config.rank, config.scaled_alpha)

    def __post_init__(self) -> None:
        most = min(self.expert.d_model, self.expert.d_ff)
        if not 1 <= self.rank <= most:
            raise ConfigError(f"lora.rank: expected 1 to {most}, the expert's smaller width, got {self.rank}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix, in order."""
        expert, rank = self.expert, self.rank
        return (
            (rank, expert.d_model),
            (expert.inner_rows, rank),
            (rank, expert.d_ff),
            (expert.d_model, rank),
        )

    @property
    def numel(self) -> int:
        """Parameters of the pairs of one expert."""
        return sum(rows * columns for rows, columns in self.sizes)

    def views(self, flat: Tensor) -> PairViews:
        """The matrices inside ``flat``. Raises ValueError unless it is 1-D of ``numel``."""
        if flat.dim() != 1 or flat.numel() != self.numel:
            raise ValueError(
                f"a pair is a flat tensor of {self.numel} elements, got shape {tuple(flat.shape)}"
            )
        parts, begin = [], 0
        for rows, columns in self.sizes:
            parts.append(flat[begin : begin + rows * columns].view(rows, columns))
            begin += rows * columns
        return PairViews(*parts)
