"""The configuration of the built-in model, and the division of its dense parameters by tensor parallelism.

Attention and feed-forward networks are divided as in Megatron-LM (Shoeybi et al. 2019, section 3; Pipeline MoE, section
3.1.3): the first product of each pair by its outputs (dimension 0 of the parameter), the second by its inputs (dimension
1), so that one sum over ranks is enough for each pair. Embedding, head, norms and routers are not divided: every rank has
them whole. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from tierstore.config import check_positive, choose_member, key
from tierstore.errors import ConfigError
from tierstore.model.architecture import Architecture, DenseUnit
from tierstore.moe.config import (
    BUILT_IN_ACTIVATIONS,
    Activation,
    ExpertShape,
    RouterConfig,
    RouterNoise,
    SaveActivations,
    network_divisions,
)
from tierstore.parallel.layout import Division

if TYPE_CHECKING:
    import torch


class ComputeDtype(StrEnum):
    """The type in which blocks compute. Dense masters, norms, softmax, router and loss are fp32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return 4 if self is ComputeDtype.FP32 else 2

    @property
    def torch(self) -> torch.dtype:
        """The torch dtype."""
        import torch  # plans read configurations without torch

        return torch.float32 if self is ComputeDtype.FP32 else torch.bfloat16


class CheckpointActivations(StrEnum):
    """What the backward pass recomputes."""

    OFF = "off"
    BLOCK = "block"  # each whole block, from its input; its experts are requested a third time


class TieEmbeddings(StrEnum):
    """Whether the head is the embedding."""

    TIED = "tied"
    UNTIED = "untied"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder transformer with MoE layers. Raises ConfigError naming the field.

    Blocks ``moe_every - 1, 2 * moe_every - 1, ...`` hold a mixture of ``experts`` networks of width
    ``d_ff``; the others a dense one of width ``d_ff_dense`` (0: ``4 * d_model``). With a ``moe_every`` of 0 no block has
    experts: the dense backbone, whose networks are by default as wide as an expert.
    """

    vocab_size: int = key(256, "size (text is read as bytes)")
    d_model: int = key(256, "width")
    n_layers: int = key(2, "blocks")
    n_heads: int = key(4, "attention heads")
    seq_len: int = key(256, "tokens of a sequence")
    d_ff: int = key(1024, "inner width of an expert")
    d_ff_dense: int = key(0, "inner width of blocks without experts (0: 4 x d_model; d_ff if moe_every is 0)")
    experts: int = key(64, "experts of an MoE layer")
    top_k: int = key(2, "experts of a token")
    moe_every: int = key(1, "every N-th block has experts (0: none)")
    activation: Activation = key(Activation.SWIGLU, "activation of experts and dense networks")
    tie_embeddings: TieEmbeddings = key(TieEmbeddings.UNTIED, "whether the head is the embedding")
    shared_expert_d_ff: int = key(0, "inner width of a shared expert for all tokens (0: none)")
    aux_loss_weight: float = key(0.01, "weight of the balance loss")
    z_loss_weight: float = key(1e-3, "weight of the router's z-loss")
    router_noise: RouterNoise = key(RouterNoise.NONE, "noise of the router in training")
    router_noise_std: float = key(0.0, "strength of that noise")
    capacity_factor: float | None = key(
        None, "most tokens of an expert, as a multiple of an equal share (none: drop no token)"
    )
    normalize_topk: bool | None = key(
        None, "make the weights of a token's experts sum to one (none: if top_k > 1)"
    )
    rope_theta: float = key(10_000.0, "base of the rotary position angles")
    norm_eps: float = key(1e-5, "epsilon under the root of norms")
    checkpoint_activations: CheckpointActivations = key(
        CheckpointActivations.OFF, "what the backward pass recomputes"
    )
    expert_activations: SaveActivations = key(
        SaveActivations.SAVE, "keep experts' activations, or recompute them"
    )
    compute_dtype: ComputeDtype = key(ComputeDtype.FP32, "type in which blocks compute; masters are fp32")
    seed: int = key(0, "seed of initial weights and router noise")

    def __post_init__(self) -> None:
        for name in ("d_model", "n_layers", "n_heads", "seq_len", "d_ff"):
            _at_least(name, getattr(self, name), 1)
        _at_least("vocab_size", self.vocab_size, 2)
        for name in ("d_ff_dense", "shared_expert_d_ff", "moe_every"):
            _at_least(name, getattr(self, name), 0)
        if self.d_model % (2 * self.n_heads):
            raise ConfigError(
                f"n_heads: d_model {self.d_model} must be a multiple of twice n_heads {self.n_heads}"
                " (rotary positions turn pairs)"
            )
        if self.moe_every > self.n_layers:
            raise ConfigError(f"moe_every: {self.moe_every} leaves no MoE layer in {self.n_layers} blocks")
        check_positive(self, "rope_theta", "norm_eps")
        if self.activation not in BUILT_IN_ACTIVATIONS:
            choices = ", ".join(BUILT_IN_ACTIVATIONS)
            raise ConfigError(f"activation: expected one of {choices}, got {self.activation!r}")
        for name, kind in (
            ("activation", Activation),
            ("tie_embeddings", TieEmbeddings),
            ("router_noise", RouterNoise),
            ("checkpoint_activations", CheckpointActivations),
            ("expert_activations", SaveActivations),
            ("compute_dtype", ComputeDtype),
        ):
            choose_member(self, name, kind)
        try:
            _ = self.router, self.expert_shape
        except ConfigError as error:
            text = str(error)
            raise ConfigError(f"router_{text}" if text.startswith("noise") else text) from error

    @property
    def router(self) -> RouterConfig:
        """The configuration of every router."""
        return RouterConfig(
            experts=self.experts,
            top_k=self.top_k,
            aux_loss_weight=self.aux_loss_weight,
            z_loss_weight=self.z_loss_weight,
            noise=self.router_noise,
            noise_std=self.router_noise_std,
            capacity_factor=self.capacity_factor,
            normalize_topk=self.normalize_topk,
        )

    @property
    def expert_shape(self) -> ExpertShape:
        """The shape of every expert."""
        return ExpertShape(self.d_model, self.d_ff, self.activation)

    @property
    def dense_shape(self) -> ExpertShape:
        """The shape of the feed-forward network in blocks without experts."""
        width = self.d_ff_dense or (4 * self.d_model if self.moe_every else self.d_ff)
        return ExpertShape(self.d_model, width, self.activation)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The blocks with experts: the layer numbers in requests to an expert source."""
        every = self.moe_every
        return tuple(range(every - 1, self.n_layers, every)) if every else ()

    @property
    def architecture(self) -> Architecture:
        """The number and location of its parameters."""
        d = self.d_model
        shared = 0
        if self.shared_expert_d_ff:
            shared = ExpertShape(d, self.shared_expert_d_ff, self.activation).numel
        table = self.vocab_size * d
        units = [DenseUnit(matrices=0, others=table)]
        for layer in range(self.n_layers):
            if layer in self.moe_layers:
                units.append(DenseUnit(matrices=4 * d * d + shared, others=2 * d + self.experts * d))
            else:
                units.append(DenseUnit(matrices=4 * d * d + self.dense_shape.numel, others=2 * d))
        tied = self.tie_embeddings is TieEmbeddings.TIED
        return Architecture(
            units=(*units, DenseUnit(matrices=0, others=d if tied else d + table)),
            moe_layers=self.moe_layers,
            experts=self.experts,
            expert_numel=self.expert_shape.numel,
            top_k=self.top_k,
        )

    def vary(self, name: str, value: object) -> ModelConfig:
        """A copy with another value of the field ``name``. Raises ConfigError."""
        return replace(self, **{name: value})  # type: ignore[arg-type]


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}: expected a whole number of at least {least}, got {value!r}")


# Tensor parallelism -----------------------------------------------------------------------------------------


#: The products of queries, keys and values; the output product of attention.
ATTENTION = Division(0, blocks=3), Division(1)


def divisions(config: ModelConfig) -> dict[str, Division]:
    """The parameters of ``config``'s transformer that are divided, by their names in it."""
    found: dict[str, Division] = {}
    for layer in range(config.n_layers):
        block = f"blocks.{layer}"
        found[f"{block}.attention.qkv"], found[f"{block}.attention.out"] = ATTENTION
        if layer not in config.moe_layers:
            found.update(_network(f"{block}.ffn", config.dense_shape))
        elif config.shared_expert_d_ff:
            shared = ExpertShape(config.d_model, config.shared_expert_d_ff, config.activation)
            found.update(_network(f"{block}.mixture.shared", shared))
    return found


def _network(name: str, shape: ExpertShape) -> dict[str, Division]:
    inner, down = network_divisions(Activation(shape.activation))
    return {f"{name}.inner": inner, f"{name}.down": down}


def check_divisible(config: ModelConfig, ranks: int) -> None:
    """Raises ConfigError naming the setting if ``ranks`` tensor-parallel ranks cannot divide the model's layers."""
    asked = f"expected a multiple of parallel.tensor = {ranks}"
    if config.n_heads % ranks:
        raise ConfigError(f"model.n_heads: {asked}, which divides attention by heads, got {config.n_heads}")
    if len(config.moe_layers) < config.n_layers and config.dense_shape.d_ff % ranks:
        raise ConfigError(f"model.d_ff_dense: {asked}, got {config.dense_shape.d_ff}")
    if config.shared_expert_d_ff % ranks:
        raise ConfigError(f"model.shared_expert_d_ff: {asked}, got {config.shared_expert_d_ff}")
