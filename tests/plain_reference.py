"""The same model as ordinary modules in memory, trained by torch alone: the oracle, and the baseline.

The mixture here is written as anyone would, with ``topk``, a mask for each expert, ``F.linear`` and
autograd, and shares no code with :class:`tierstore.moe.MoELayer`: agreement of the two means something.
First weights are equal, because they are keyed by what they are for. Noise and a capacity factor are
refused: they are not part of it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierstore.errors import ConfigError
from tierstore.model import Batch, ModelConfig, Transformer
from tierstore.moe import Activation, FeedForward, NoiseKey, Router, RouterNoise, Routing, initial_expert
from tierstore.moe.config import ExpertShape
from tierstore.store.adamw import AdamWConfig, Inactive
from tierstore.train.config import ScheduleConfig


def plain_expert(shape: ExpertShape, flat: Tensor, x: Tensor) -> Tensor:
    """One expert of any activation under autograd, by its definition."""
    views, kind = shape.views(flat), shape.activation
    if kind is Activation.CLAMPED_SWIGLU:
        inner = x @ views.inner + views.inner_bias
        gate, up = inner[:, ::2].clamp(max=shape.limit), inner[:, 1::2].clamp(-shape.limit, shape.limit)
        return (up + 1) * gate * torch.sigmoid(shape.alpha * gate) @ views.down + views.down_bias
    inner = x @ views.inner.t()
    if kind is Activation.GELU:
        return F.gelu(inner) @ views.down.t()
    gate, up = inner.chunk(2, dim=-1)
    gates = {
        Activation.SWIGLU: F.silu,
        Activation.GEGLU: F.gelu,
        Activation.GEGLU_TANH: lambda part: F.gelu(part, approximate="tanh"),
        Activation.REGLU: F.relu,
    }
    return gates[kind](gate) * up @ views.down.t()


class PlainExpert(nn.Module):
    """One expert of three (or two) ordinary matrices."""

    def __init__(self, shape: ExpertShape, flat: Tensor) -> None:
        super().__init__()
        self.swiglu = shape.activation == Activation.SWIGLU
        size, matrix = shape.d_ff * shape.d_model, (shape.d_ff, shape.d_model)
        if self.swiglu:
            self.gate = nn.Parameter(flat[:size].view(matrix).clone())
        self.up = nn.Parameter(flat[-2 * size : -size].view(matrix).clone())
        self.down = nn.Parameter(flat[-size:].view(shape.d_model, shape.d_ff).clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.swiglu:
            hidden = F.silu(F.linear(x, self.gate.to(x.dtype))) * F.linear(x, self.up.to(x.dtype))
        else:
            hidden = F.gelu(F.linear(x, self.up.to(x.dtype)))
        return F.linear(hidden, self.down.to(x.dtype))

    def flat(self) -> Tensor:
        """The weights as they lie in a record."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])

    def flat_grad(self) -> Tensor | None:
        """The gradients as they lie in a record, or None if no token came."""
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        return torch.cat([grad.flatten() for grad in grads]) if grads else None


class PlainMixture(nn.Module):
    """A mixture of :class:`PlainExpert`, by masks and autograd."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        if config.router_noise != RouterNoise.NONE or config.capacity_factor is not None:
            raise ConfigError("router_noise, capacity_factor: the plain reference has neither")
        self.config = config
        self.router = Router(config.router, config.d_model, layer=layer, seed=config.seed)  # for its weight
        self.shared: FeedForward | None = None
        shape = config.expert_shape
        if config.shared_expert_d_ff:
            shared = ExpertShape(config.d_model, config.shared_expert_d_ff, config.activation)
            self.shared = FeedForward(shared, seed=config.seed, name=f"shared.{layer}")
        self.experts = nn.ModuleList(
            PlainExpert(
                shape,
                initial_expert(shape, seed=config.seed, layer=layer, expert=expert, layers=config.n_layers),
            )
            for expert in range(config.experts)
        )

    def forward(self, x_TD: Tensor, _key: NoiseKey) -> tuple[Tensor, Routing]:
        experts, top_k = self.config.experts, self.config.top_k
        logits_TE = F.linear(x_TD.float(), self.router.weight)
        probability_TE = torch.softmax(logits_TE, dim=-1)
        weight_TK, expert_TK = torch.topk(probability_TE, top_k, dim=-1)
        if self.config.router.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        y_TD = torch.zeros(x_TD.shape, dtype=weight_TK.dtype, device=x_TD.device)
        for index, expert in enumerate(self.experts):
            tokens, choice = torch.where(expert_TK == index)
            if tokens.numel():
                out = expert(x_TD[tokens]).to(y_TD.dtype) * weight_TK[tokens, choice, None]
                y_TD = y_TD.index_add(0, tokens, out)
        y_TD = y_TD.to(x_TD.dtype)
        if self.shared is not None:
            y_TD = y_TD + self.shared(x_TD)
        first_E = F.one_hot(expert_TK[:, 0], experts).float().mean(dim=0)
        aux_loss = experts * (first_E * probability_TE.mean(dim=0)).sum()
        z_loss = (torch.logsumexp(logits_TE, dim=-1) ** 2).mean()
        load_E = F.one_hot(expert_TK, experts).sum(dim=(0, 1))
        return y_TD, Routing(expert_TK, weight_TK, aux_loss, z_loss, load_E.unsqueeze(0))


@dataclass(frozen=True, slots=True)
class PlainStep:
    """What one step did: losses in nats, mean over micro-batches; the norm before clipping, or None."""

    loss: float
    aux_loss: float
    grad_norm: float | None
    loads: tuple[Tensor, ...]


class PlainTrainer:
    """``torch.optim.AdamW(fused=True)`` over every parameter, all of it in memory.

    ``clip_norm`` None: gradients are not clipped. ``step(batches)`` runs the micro-batches of one step, each
    weighing ``1 / len(batches)``.
    """

    def __init__(
        self,
        config: ModelConfig,
        schedule: ScheduleConfig,
        adamw: AdamWConfig,
        *,
        clip_norm: float | None = None,
    ) -> None:
        if clip_norm is not None and not (math.isfinite(clip_norm) and clip_norm > 0):
            raise ConfigError(f"clip_norm: expected more than 0, got {clip_norm}")
        self.model = Transformer(config, None, mixture=lambda layer: PlainMixture(config, layer))
        self.steps = 0
        self._schedule = schedule
        self._inactive = adamw.inactive
        self._clip_norm = clip_norm
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=schedule.lr_at(0),
            betas=adamw.betas,
            eps=adamw.eps,
            weight_decay=adamw.weight_decay,
            fused=True,
        )

    def step(self, batches: Iterable[Batch]) -> PlainStep:
        """Forward, backward and one AdamW step over ``batches`` of tokens and targets."""
        pairs = list(batches)
        loss, aux_loss = 0.0, 0.0
        loads: list[Tensor] = []
        self._optimizer.zero_grad(set_to_none=True)
        for micro, batch in enumerate(pairs):
            self.model.set_step(self.steps, micro)
            output = self.model.run(batch)
            (output.objective / len(pairs)).backward()
            loss += float(output.loss.detach()) / len(pairs)
            aux_loss += float(output.aux_loss.detach()) / len(pairs)
            loads = (
                list(output.loads) if not loads else [a + b for a, b in zip(loads, output.loads, strict=True)]
            )
        norm: float | None = None
        if self._clip_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm))
        if self._inactive is Inactive.EXACT:
            for parameter in self.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.lr_at(self.steps)
        self._optimizer.step()
        self.steps += 1
        return PlainStep(loss, aux_loss, norm, tuple(loads))

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean cross entropy over ``batches``, nats."""
        self.model.eval()
        total, tokens_seen = 0.0, 0
        for batch in batches:
            total += float(self.model.run(batch).loss) * batch.counted
            tokens_seen += batch.counted
        self.model.train()
        return total / max(1, tokens_seen)

    def expert(self, layer: int, expert: int) -> PlainExpert:
        """One expert of block ``layer``."""
        return self.model.get_submodule(f"blocks.{layer}.mixture.experts.{expert}")
