"""A small model with every kind of dense parameter, trained over a group of ranks: what tests and their ranks share.

The global batch of a step is ``PIECES`` micro-batches. They are spread over ranks, and over micro-batches on each: rank
r takes pieces r, r + N, ... so that one process adds the very gradients, in the same order, that ranks add when each
has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from tierstore.config import load
from tierstore.dense import DenseConfig, DenseSlices, DenseTraffic, GatherOnDemand, PassListener, unit_layouts
from tierstore.dense.layout import DenseBytes
from tierstore.model import ModelConfig, Transformer
from tierstore.moe import ExpertShape, FeedForward, NoiseKey, Routing
from tierstore.moe.router import Router
from tierstore.parallel import RankGroup
from tierstore.store.adamw import AdamWConfig

ADAMW = AdamWConfig()
LR = 1e-3
_TINY = {"vocab_size": 40, "d_model": 16, "n_layers": 3, "n_heads": 2, "seq_len": 8, "d_ff": 24, "experts": 5}


class Mixture(nn.Module):
    """A router and one shared network: the dense parameters of an MoE layer, without its experts."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.router = Router(config.router, config.d_model, layer=layer, seed=config.seed)
        shape = ExpertShape(config.d_model, config.d_ff, config.activation)
        self.shared = FeedForward(shape, seed=config.seed, name=f"shared.{layer}")

    def forward(self, x_TD: Tensor, key: NoiseKey) -> tuple[Tensor, Routing]:
        routing = self.router(x_TD, key)
        return self.shared(x_TD) * routing.weight_TK[:, :1].to(x_TD.dtype), routing


def make_model(changes: dict[str, Any]) -> Transformer:
    config = ModelConfig(**{**_TINY, "moe_every": 2, **changes})
    return Transformer(config, None, mixture=lambda layer: Mixture(config, layer))


def piece(config: ModelConfig, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one piece of the global batch."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(config.vocab_size, (2, config.seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def since(traffic: DenseTraffic, before: DenseTraffic) -> DenseTraffic:
    """What was added to ``traffic`` since ``before`` was copied."""
    names = [one.name for one in fields(DenseTraffic)]
    return DenseTraffic(**{name: getattr(traffic, name) - getattr(before, name) for name in names})


@dataclass(frozen=True)
class Setting:
    """One training run: ``pieces`` micro-batches a step over all ranks. ``trained``: a part of the names of the parameters
    that are trained, the others stay as they are.
    """

    steps: int = 3
    pieces: int = 4
    clip: float = 0.0
    model: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, Any] = field(default_factory=dict)
    trained: str = ""


@dataclass
class Outcome:
    """What one rank saw. ``weights`` are whole, by the model's names; ``traffic`` is that of the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    traffic: DenseTraffic = field(default_factory=DenseTraffic)
    nbytes: DenseBytes = field(default_factory=lambda: DenseBytes(0, 0, 0))


def freeze(model: Transformer, trained: str) -> None:
    """Leaves parameters alone whose names do not contain ``trained``."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)


def trained_units(model: Transformer) -> list[tuple[str, list[nn.Parameter]]]:
    """The model's units, of which some may have nothing that is trained."""
    units = model.dense_units()
    return [(name, [part for part in parameters if part.requires_grad]) for name, parameters in units]


def slice_model(
    model: Transformer,
    group: RankGroup,
    changes: dict[str, Any],
    listen: Callable[[DenseSlices], PassListener] | None = None,
) -> DenseSlices:
    """The model's dense parameters, sliced, with gates that ``listen`` (None: gathers on demand) hears."""
    config = load(DenseConfig, None, changes)
    units = trained_units(model)
    layouts = unit_layouts(units, ranks=group.size, narrow=model.cast_parameters(), fusion=config.fusion)
    dense = DenseSlices(
        units,
        layouts,
        group=group,
        device=torch.device("cpu"),
        adamw=ADAMW,
        config=config,
        compute=model.config.compute_dtype.torch,
    )
    dense.attach(model, GatherOnDemand(dense, config.reshard) if listen is None else listen(dense))
    return dense


def backward(model: Transformer, dense: DenseSlices, group: RankGroup, setting: Setting, step: int) -> float:
    """Gradients of one step, as means over the pieces; the mean loss of this rank's pieces."""
    dense.zero_grad()
    total, micros = 0.0, setting.pieces // group.size
    for micro in range(micros):
        dense.begin_micro()
        tokens, targets = piece(model.config, step, group.rank + micro * group.size)
        model.set_step(step, micro)
        output = model(tokens, targets)
        torch.autograd.backward(output.objective / setting.pieces)
        dense.end_micro()
        total += float(output.loss.detach()) / micros
    return total


def whole_weights(model: Transformer, dense: DenseSlices) -> dict[str, Tensor]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {}
    for number, (_, parameters) in enumerate(trained_units(model)):
        for parameter, value in zip(parameters, dense.whole(number), strict=True):
            found[names[id(parameter)]] = value
    return found


def train_group(group: RankGroup, setting: Setting) -> Outcome:
    model = make_model(setting.model)
    freeze(model, setting.trained)
    dense = slice_model(model, group, setting.dense)
    outcome = Outcome(nbytes=dense.nbytes)
    for step in range(setting.steps):
        before = replace(dense.traffic)
        outcome.losses.append(backward(model, dense, group, setting, step))
        squares = sum(dense.squares())
        outcome.norms.append(squares**0.5)
        if setting.clip:
            dense.scale_gradients(min(1.0, setting.clip / (squares**0.5 + 1e-6)))
        dense.step(LR * (1 + step % 3))
        outcome.traffic = since(dense.traffic, before)
    outcome.weights = whole_weights(model, dense)
    return outcome
