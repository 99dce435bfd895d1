"""What all rivals train: an ordinary torch module, its first weights by name, and its batches.

The built-in model serves them as it is; its mixtures are replaced by ordinary parameters (``Mixture``), and the objective is
its own. ``module`` may be called where a library allocates parameters as it likes: what it initialises does not count, and
every parameter is filled from ``first_weights`` afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tierstore.errors import ConfigError
from tierstore.model.config import ModelConfig
from tierstore.model.transformer import Transformer
from tierstore.moe import FeedForward, InMemoryExperts, NoiseKey, RouterNoise, initial_expert
from tierstore.moe.config import ExpertShape
from tierstore.store.adamw import Inactive
from tierstore.train.config import TrainConfig
from tierstore.train.data import TrainingData
from tierstore.train.sources import open_data

#: The values of a parameter by its name in ``RivalWorkload.module``.
FirstWeights = Callable[[str], Tensor]


class RivalWorkload(Protocol):
    """A model that any library can train."""

    def module(self) -> nn.Module:
        """``(tokens_BT, targets_BT)`` to ``(objective, loss)``: what to differentiate, and the mean cross entropy."""
        ...

    def blocks(self, module: nn.Module) -> Iterable[nn.Module]:
        """The parts of ``module`` that a library may gather and release one after another."""
        ...

    def first_weights(self) -> FirstWeights:
        """The weights that tierstore begins with."""
        ...

    def data(self, store: Path) -> TrainingData:
        """The batches. ``store``: a directory for tokens."""
        ...


def check_workload(config: TrainConfig) -> None:
    """Raises ConfigError for what is not part of the comparison."""
    model = config.model
    if not isinstance(model, ModelConfig):
        raise ConfigError("model: the rivals train the built-in model, or a Mixtral of its sizes")
    if model.router_noise is not RouterNoise.NONE or model.capacity_factor is not None:
        raise ConfigError("model.router_noise, model.capacity_factor: the rivals have neither")
    if model.compute_dtype.torch != torch.float32:
        raise ConfigError("model.compute_dtype: the rivals compute in fp32")
    if config.adamw.inactive is not Inactive.EXACT:
        raise ConfigError("adamw.inactive: the rivals step every parameter in every step; expected exact")
    if config.lora.enabled:
        raise ConfigError("lora.rank: the rivals train every parameter")


def fill(module: nn.Module, first: FirstWeights) -> None:
    """Gives every parameter of ``module`` its first weights."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(first(name))


# The built-in model -----------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a model sees of a mixture's routing. A tuple, in which libraries find the tensors."""

    aux_loss: Tensor
    z_loss: Tensor
    load_E: Tensor


class Mixture(nn.Module):
    """A mixture of ordinary parameters. Every expert is called, with or without tokens: some libraries expect the same
    modules in every pass, and AdamW steps experts without a gradient as if it were zero.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.d_model, config.experts, bias=False)
        self.shared: FeedForward | None = None
        if config.shared_expert_d_ff:
            shape = ExpertShape(config.d_model, config.shared_expert_d_ff, config.activation)
            self.shared = FeedForward(shape)
        self.experts = nn.ModuleList(FeedForward(config.expert_shape) for _ in range(config.experts))

    def forward(self, x_TD: Tensor, _key: NoiseKey) -> tuple[Tensor, Seen]:
        config = self.config
        logits_TE = self.router(x_TD)
        probability_TE = logits_TE.softmax(dim=-1)
        weight_TK, expert_TK = torch.topk(probability_TE, config.top_k, dim=-1)
        if config.router.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        y_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token_M, choice_M = torch.where(expert_TK == number)
            y_MD = expert(x_TD.index_select(0, token_M)) * weight_TK[token_M, choice_M, None]
            y_TD = y_TD.index_add(0, token_M, y_MD)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        first_E = torch.bincount(expert_TK[:, 0], minlength=config.experts) / x_TD.shape[0]
        aux_loss = config.experts * torch.dot(first_E.to(probability_TE), probability_TE.mean(dim=0))
        z_loss = logits_TE.logsumexp(dim=-1).square().mean()
        load_E = torch.bincount(expert_TK.flatten(), minlength=config.experts)
        return y_TD, Seen(aux_loss, z_loss, load_E)


class PlainTransformer(Transformer):
    """The built-in model as an ordinary module, whose forward pass gives a tuple of tensors."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, None, mixture=lambda layer: Mixture(config))

    def forward(  # type: ignore[override]
        self, tokens_BT: Tensor, targets_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        output = super().forward(tokens_BT, targets_BT)
        assert output.objective is not None
        assert output.loss is not None
        return output.objective, output.loss


class BuiltIn:
    """The built-in model of a configuration."""

    def __init__(self, config: TrainConfig) -> None:
        check_workload(config)
        assert isinstance(config.model, ModelConfig)
        self._config, self._model = config, config.model

    def module(self) -> nn.Module:
        return PlainTransformer(self._model)

    def blocks(self, module: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(module, Transformer)
        return module.blocks

    def first_weights(self) -> FirstWeights:
        model, shape = self._model, self._model.expert_shape
        none = InMemoryExperts(shape, layers=(), experts=0)
        dense = dict(Transformer(model, none).named_parameters())
        made: dict[tuple[int, int], Tensor] = {}

        def first(name: str) -> Tensor:
            if ".experts." not in name:
                return dense[name].detach()
            _, layer, _, _, expert, part = name.split(".")
            key = int(layer), int(expert)
            if key not in made:
                made.clear()  # an expert's parameters are asked for together
                made[key] = initial_expert(
                    shape, seed=model.seed, layer=key[0], expert=key[1], layers=model.n_layers
                )
            flat, size = made[key], shape.inner_rows * shape.d_model
            if part == "inner":
                return flat[:size].view(-1, shape.d_model)
            return flat[size:].view(shape.d_model, shape.d_ff)

        return first

    def data(self, store: Path) -> TrainingData:
        model = self._model
        return open_data(
            self._config.data,
            seq_len=model.seq_len,
            vocab_size=model.vocab_size,
            tokenizer=None,
            store=store,
        )
