"""Configuration of a mixture: the shape of its experts, its router, what it keeps. Imports no torch.

A plan, and a command that only reads a configuration, must not pay for importing torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tierstore.config import check_least, check_positive, choose_member
from tierstore.errors import ConfigError
from tierstore.parallel.layout import Division
from tierstore.quant.layout import CodeFormat, PartKind, QuantizedLayout, WeightPart

if TYPE_CHECKING:
    from torch import Tensor


class Activation(StrEnum):
    """The formula of a feed-forward network; ``moe/experts.py`` implements them.

    The built-in model supports the first two. The others are those of imported models.
    """

    SWIGLU = "swiglu"
    GELU = "gelu"
    GEGLU = "geglu"
    GEGLU_TANH = "geglu_tanh"
    REGLU = "reglu"
    CLAMPED_SWIGLU = "clamped_swiglu"  # gpt-oss: transposed matrices, gate and up interleaved, biases

    @property
    def gated(self) -> bool:
        """Whether it has a gate projection beside the up projection."""
        return self is not Activation.GELU

    @property
    def transposed(self) -> bool:
        """Whether matrices are stored as (inputs, outputs) and have biases."""
        return self is Activation.CLAMPED_SWIGLU


BUILT_IN_ACTIVATIONS = (Activation.SWIGLU, Activation.GELU)


def network_divisions(activation: Activation) -> tuple[Division, Division]:
    """How tensor parallelism splits a feed-forward network's ``inner`` (gate above up, or up alone) and its ``down``."""
    return Division(0, blocks=2 if activation.gated else 1), Division(1)


@dataclass(frozen=True, slots=True)
class ExpertViews:
    """Views into a flat expert: ``inner`` (P, D) and ``down`` (D, F).

    Of a transposed expert they are (D, P) and (F, D), with ``inner_bias`` (P) and ``down_bias`` (D).
    """

    inner: Tensor
    down: Tensor
    inner_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape of one expert. Raises ConfigError naming the field.

    ``alpha`` and ``limit`` belong to CLAMPED_SWIGLU alone.
    """

    d_model: int
    d_ff: int
    activation: Activation = Activation.SWIGLU
    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        check_least(self, 1, "d_model", "d_ff")
        choose_member(self, "activation", Activation)
        check_positive(self, "alpha", "limit")

    @property
    def inner_rows(self) -> int:
        """P: the number of outputs of ``inner``, which feed the activation."""
        return 2 * self.d_ff if self.activation.gated else self.d_ff

    @property
    def numel(self) -> int:
        """Parameters of one expert."""
        biases = self.inner_rows + self.d_model if self.activation.transposed else 0
        return (self.inner_rows + self.d_ff) * self.d_model + biases

    def quantized(self, codes: CodeFormat) -> QuantizedLayout:
        """The layout of the weights as codes: parts in the order of the flat ones, so that ``inner`` is the first, and
        ``down`` the second or, after the bias of ``inner``, the third. Biases stay fp32.
        """
        sizes = ((self.inner_rows, self.d_model), (self.d_model, self.d_ff))
        if not self.activation.transposed:
            return QuantizedLayout(codes, tuple(WeightPart(PartKind.MATRIX, *size) for size in sizes))
        parts = [
            part
            for rows, columns in sizes
            for part in (
                WeightPart(PartKind.TRANSPOSED, rows, columns),
                WeightPart(PartKind.PLAIN, 1, rows),
            )
        ]
        return QuantizedLayout(codes, tuple(parts))

    def views(self, flat: Tensor) -> ExpertViews:
        """The matrices inside ``flat``. Raises ValueError unless it is 1-D of ``numel``."""
        self.check(flat)
        inner, inner_bias = self.inner_of(flat)
        down, down_bias = self.down_of(flat)
        return ExpertViews(inner, down, inner_bias, down_bias)

    def check(self, flat: Tensor) -> None:
        """Raises ValueError unless ``flat`` is 1-D of ``numel``."""
        if flat.dim() != 1 or flat.numel() != self.numel:
            raise ValueError(
                f"an expert is a flat tensor of {self.numel} elements, got shape {tuple(flat.shape)}"
            )

    def inner_of(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """``inner`` and its bias inside ``flat``, which is not checked."""
        split = self.inner_rows * self.d_model
        if not self.activation.transposed:
            return flat[:split].view(self.inner_rows, self.d_model), None
        return flat[:split].view(self.d_model, self.inner_rows), flat[split : split + self.inner_rows]

    def down_of(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """``down`` and its bias inside ``flat``, which is not checked."""
        split = self.inner_rows * self.d_model
        if not self.activation.transposed:
            return flat[split:].view(self.d_model, self.d_ff), None
        down = split + self.inner_rows
        end = down + self.d_ff * self.d_model
        return flat[down:end].view(self.d_ff, self.d_model), flat[end:]


#: Rows of a tile of AMX; up to as many, each number of rows has products of its own.
_TILE = 16


def tile_rows(rows: int) -> int:
    """``rows`` rounded up to whole tiles of AMX, and beyond 256 by at most a sixteenth: few numbers are left.

    oneDNN compiles a product in bf16 for each number of rows, which takes 5 to 10 ms with AMX: several times as long as
    the product of 200 rows at width 1,024.
    """
    if rows <= _TILE:
        return rows
    step = max(_TILE, 1 << ((rows - 1).bit_length() - 5))
    return -(-rows // step) * step


class RouterNoise(StrEnum):
    """Noise on the router's input while training."""

    NONE = "none"
    JITTER = "jitter"  # each input times uniform [1 - std, 1 + std] (Switch Transformer, section 2.2)


class SaveActivations(StrEnum):
    """What a layer keeps for its backward pass."""

    SAVE = "save"  # N * P values of the compute type, in one buffer; N * D more with tokens of other ranks
    RECOMPUTE = (
        "recompute"  # only the input; the backward pass repeats one product per expert (and its exchange)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Configuration of one router. Raises ConfigError naming the field.

    ``capacity_factor`` None: dropless; otherwise an expert takes at most ``ceil(capacity_factor * T * K / E)``
    assignments. ``normalize_topk`` None: the K weights of a token sum to 1 if K is at least 2; with K = 1 the weight is
    the probability, without which the router would get no gradient.
    """

    experts: int
    top_k: int = 2
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 1e-3
    noise: RouterNoise = RouterNoise.NONE
    noise_std: float = 0.0
    capacity_factor: float | None = None
    normalize_topk: bool | None = None

    def __post_init__(self) -> None:
        check_least(self, 1, "experts")
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(f"top_k: expected 1 to {self.experts} (experts), got {self.top_k}")
        check_least(self, 0, "aux_loss_weight", "z_loss_weight")
        choose_member(self, "noise", RouterNoise)
        if self.noise == RouterNoise.JITTER and not 0 < self.noise_std < 1:
            raise ConfigError(f"noise_std: expected more than 0 and less than 1, got {self.noise_std}")
        if self.noise == RouterNoise.NONE and self.noise_std != 0:
            raise ConfigError(f"noise_std: {self.noise_std} has no effect with noise = none")
        check_positive(self, "capacity_factor")
        if self.normalize_topk and self.top_k == 1:
            raise ConfigError(
                "normalize_topk: with top_k = 1 every weight would be 1 and the router would not learn"
            )

    @property
    def normalized(self) -> bool:
        """Whether the K weights of a token sum to 1."""
        return self.top_k > 1 if self.normalize_topk is None else self.normalize_topk

    def capacity(self, tokens: int) -> int | None:
        """The most assignments that one expert takes from a pass of ``tokens``; None: no limit."""
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * tokens * self.top_k / self.experts))
