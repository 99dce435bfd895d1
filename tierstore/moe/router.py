"""Which experts a token goes to, and how much each of them counts.

Shapes: T tokens, K experts a token, E experts, D width of the model.

Logits, softmax and both losses are computed in fp32 (fp64 if the input is fp64), whatever the compute
type: a router in bf16 makes ties, and ties make the choice depend on rounding. Where probabilities do tie,
the lower index wins.

Losses (unweighted; the caller weighs them):

* load balance, GShard (Lepikhin et al. 2020, Algorithm 1) in the scale of Switch Transformer (Fedus et
  al. 2021, equation 4): ``E * sum_e f_e * m_e``, with ``f_e`` the share of tokens whose first choice is e
  and ``m_e`` the mean probability of e. It is 1 when both are uniform.
* z-loss, ST-MoE (Zoph et al. 2022, equation 5): ``mean_t logsumexp(logits_t)**2``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierstore.moe.config import RouterConfig, RouterNoise
from tierstore.moe.seeds import keyed_generator

__all__ = ["NoiseKey", "Router", "RouterConfig", "RouterNoise", "Routing"]


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Where in the training a forward pass stands: the same key draws the same noise."""

    step: int = 0
    micro: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for one pass.

    ``expert_TK`` int64, -1 where the assignment was dropped; ``weight_TK`` fp32 (or fp64), 0 where dropped;
    ``aux_loss`` and ``z_loss`` unweighted scalars; ``load_E`` int64, assignments that each expert got.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    load_E: Tensor


class Router(nn.Module):
    """Linear router with top-k choice. ``layer`` and ``seed`` key its noise."""

    def __init__(self, config: RouterConfig, d_model: int, *, layer: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.seed = seed
        self.weight = nn.Parameter(torch.empty(config.experts, d_model))
        nn.init.normal_(self.weight, std=0.02, generator=keyed_generator(seed, "router", layer))

    def forward(self, x_TD: Tensor, key: NoiseKey) -> Routing:
        """Route ``x_TD``. Noise is drawn in training mode only."""
        config = self.config
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        x_TD = x_TD.to(dtype)
        if config.noise == RouterNoise.JITTER and self.training:
            generator = keyed_generator(self.seed, "noise", key.step, key.micro, self.layer)
            noise_TD = torch.rand(x_TD.shape, generator=generator, dtype=torch.float32)
            x_TD = x_TD * (1 + config.noise_std * (2 * noise_TD - 1)).to(x_TD)
        logits_TE = F.linear(x_TD, self.weight.to(dtype))
        probability_TE = logits_TE.softmax(dim=-1)
        # A stable sort keeps equal probabilities in index order; topk promises no order at all.
        ranked_TE = probability_TE.detach().sort(dim=-1, descending=True, stable=True).indices
        expert_TK = ranked_TE[:, : config.top_k].contiguous()
        weight_TK = probability_TE.gather(1, expert_TK)
        if config.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        first_E = torch.bincount(expert_TK[:, 0], minlength=config.experts).to(dtype)
        tokens = max(1, x_TD.shape[0])
        aux_loss = config.experts * torch.dot(first_E / tokens, probability_TE.sum(dim=0) / tokens)
        z_loss = logits_TE.logsumexp(dim=-1).square().sum() / tokens
        capacity = config.capacity(x_TD.shape[0])
        if capacity is not None:
            dropped_TK = _overflow(expert_TK, config.experts, capacity)
            expert_TK = expert_TK.masked_fill(dropped_TK, -1)
            weight_TK = weight_TK.masked_fill(dropped_TK, 0)
        load_E = torch.bincount(expert_TK.flatten() + 1, minlength=config.experts + 1)[1:]
        return Routing(expert_TK, weight_TK, aux_loss, z_loss, load_E)


def _overflow(expert_TK: Tensor, experts: int, capacity: int) -> Tensor:
    """Assignments past ``capacity``: first choices in token order, then second ones (GShard)."""
    tokens, top_k = expert_TK.shape
    by_choice_N = expert_TK.t().reshape(-1)
    order_N = by_choice_N.argsort(stable=True)
    load_E = torch.bincount(by_choice_N, minlength=experts)
    start_E = load_E.cumsum(0) - load_E
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(tokens * top_k, device=order_N.device) - start_E[by_choice_N[order_N]]
    return (place_N >= capacity).view(top_k, tokens).t()
