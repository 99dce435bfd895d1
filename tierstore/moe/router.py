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

On several data ranks a router routes its own tokens of a *global batch*: the ranks' tokens one after another,
in rank order. What is counted is counted there, from one small exchange of integers a pass, so that any number
of ranks decides what one process would:

* ``f_e``, a count over all T tokens of the global batch. It carries no gradient, so each rank may use the sum.
* ``m_e = (1 / T) sum_t p_te`` is linear in the tokens: ``m_e = sum_r m_e^(r)``, where rank r adds up its own
  tokens and divides by the global T. A rank returns its share ``E * sum_e f_e * m_e^(r)``: the shares add up to
  the loss, and so do their gradients. The z-loss is a mean over tokens, and is shared out alike.
* An expert's capacity is that of the global batch. First choices come before second ones, and tokens in global
  order: how many are ahead of a rank's own follows from the counts by (rank, choice, expert).
* Noise is drawn for the global batch, and each rank takes its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierstore.moe.config import RouterConfig, RouterNoise
from tierstore.moe.exchange import Charge, gather_counts
from tierstore.moe.seeds import keyed_generator
from tierstore.parallel import RankGroup


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Where in the training a forward pass stands: the same key draws the same noise."""

    step: int = 0
    micro: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router decided for one pass.

    ``expert_TK`` int64, -1 where the assignment was dropped; ``weight_TK`` fp32 (or fp64), 0 where dropped;
    ``aux_loss`` and ``z_loss`` unweighted scalars, this rank's shares; ``load_RE`` int64, assignments that each
    expert got from each data rank, of which this one is ``rank``.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    load_RE: Tensor
    rank: int = 0

    @property
    def load_E(self) -> Tensor:
        """Assignments that each expert got from all data ranks."""
        return self.load_RE.sum(dim=0)

    @property
    def own_load_E(self) -> Tensor:
        """Assignments that each expert got from this rank."""
        return self.load_RE[self.rank]


class Router(nn.Module):
    """Linear router with top-k choice. ``layer`` and ``seed`` key its noise.

    ``data``: the ranks that hold the global batch; with more than one, a forward pass is a collective, and
    ``charge`` makes the context in which the others are waited for.
    """

    def __init__(
        self,
        config: RouterConfig,
        d_model: int,
        *,
        layer: int = 0,
        seed: int = 0,
        data: RankGroup | None = None,
        charge: Charge | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self._charge = charge
        self.layer = layer
        self.seed = seed
        self._data = RankGroup.alone() if data is None else data
        self.weight = nn.Parameter(torch.empty(config.experts, d_model))
        nn.init.normal_(self.weight, std=0.02, generator=keyed_generator(seed, "router", layer))

    def forward(self, x_TD: Tensor, key: NoiseKey) -> Routing:
        """Route ``x_TD``. Noise is drawn in training mode only. Raises PeerError."""
        config = self.config
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        x_TD = x_TD.to(dtype)
        if config.noise == RouterNoise.JITTER and self.training:
            x_TD = x_TD * (1 + config.noise_std * (2 * self._noise(x_TD, key) - 1)).to(x_TD)
        logits_TE = F.linear(x_TD, self.weight.to(dtype))
        probability_TE = logits_TE.softmax(dim=-1)
        expert_TK = self._top(probability_TE)
        weight_TK = probability_TE.gather(1, expert_TK)
        if config.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        tokens, count_RKE = self._counted(expert_TK)
        first_E = count_RKE[:, 0].sum(dim=0).to(dtype)
        counted = max(1, tokens)
        aux_loss = config.experts * torch.dot(first_E / counted, probability_TE.sum(dim=0) / counted)
        z_loss = logits_TE.logsumexp(dim=-1).square().sum() / counted
        rank = self._data.rank
        capacity = config.capacity(tokens)
        if capacity is not None:
            ahead_RKE = _ahead(count_RKE)
            dropped_TK = _overflow(expert_TK, ahead_RKE[rank], capacity)
            expert_TK = expert_TK.masked_fill(dropped_TK, -1)
            weight_TK = weight_TK.masked_fill(dropped_TK, 0)
            count_RKE = count_RKE.minimum((capacity - ahead_RKE).clamp_(min=0))
        return Routing(expert_TK, weight_TK, aux_loss, z_loss, count_RKE.sum(dim=1), rank)

    def choose(self, x_TD: Tensor) -> Tensor:
        """The experts (T, K) that ``x_TD`` alone would go to: without noise, and none is dropped."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        return self._top(F.linear(x_TD.to(dtype), self.weight.to(dtype)).softmax(dim=-1))

    def _top(self, probability_TE: Tensor) -> Tensor:
        # A stable sort keeps equal probabilities in index order; topk promises no order at all.
        ranked_TE = probability_TE.detach().sort(dim=-1, descending=True, stable=True).indices
        return ranked_TE[:, : self.config.top_k].contiguous()

    def _counted(self, expert_TK: Tensor) -> tuple[int, Tensor]:
        """Tokens of the global batch, and choices by data rank, place in the order of choice, and expert."""
        tokens, top_k = expert_TK.shape
        experts = self.config.experts
        place_K = torch.arange(top_k, device=expert_TK.device) * experts
        count = torch.bincount((expert_TK + place_K).flatten(), minlength=top_k * experts)
        size = self._data.size
        if size > 1:
            own = torch.cat([count, count.new_tensor([tokens])])
            all_Rn = gather_counts(own, self._data, self._charge)
            tokens = int(all_Rn[:, -1].sum())
            count = all_Rn[:, :-1]
        return tokens, count.reshape(size, top_k, experts)

    def _noise(self, x_TD: Tensor, key: NoiseKey) -> Tensor:
        """This rank's rows of what is drawn for the global batch, uniform in [0, 1)."""
        tokens = [x_TD.shape[0]]
        if self._data.size > 1:
            tokens = gather_counts(torch.tensor(tokens), self._data, self._charge).flatten().tolist()
        generator = keyed_generator(self.seed, "noise", key.step, key.micro, self.layer)
        noise_TD = torch.rand((sum(tokens), x_TD.shape[1]), generator=generator, dtype=torch.float32)
        start = sum(tokens[: self._data.rank])
        return noise_TD[start : start + x_TD.shape[0]]


def _ahead(count_RKE: Tensor) -> Tensor:
    """How many assignments of the global batch come before the first one of (rank, choice, expert).

    First choices of all ranks in token order, then second ones (GShard, section 2.2: later choices yield).
    """
    by_choice_KE = count_RKE.sum(dim=0)
    earlier_choices_KE = by_choice_KE.cumsum(dim=0) - by_choice_KE
    return count_RKE.cumsum(dim=0) - count_RKE + earlier_choices_KE


def _overflow(expert_TK: Tensor, ahead_KE: Tensor, capacity: int) -> Tensor:
    """Assignments past ``capacity``, when ``ahead_KE`` others come before the first of (choice, expert)."""
    tokens, top_k = expert_TK.shape
    experts = ahead_KE.shape[1]
    place_K = torch.arange(top_k, device=expert_TK.device) * experts
    group_N = (expert_TK + place_K).t().reshape(-1)  # (choice, expert), choices first
    order_N = group_N.argsort(stable=True)
    size = torch.bincount(group_N, minlength=top_k * experts)
    start = size.cumsum(0) - size
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(tokens * top_k, device=order_N.device) - start[group_N[order_N]]
    place_N += ahead_KE.reshape(-1)[group_N]
    return (place_N >= capacity).view(top_k, tokens).t()
