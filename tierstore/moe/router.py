"""The router: chooses the experts of each token, and their weights.

Shapes: T tokens, K experts a token, E experts, D width of the model.

Logits, softmax and both losses are computed in fp32 (fp64 if the input is fp64), whatever the compute type: a router in
bf16 makes ties, and ties make the choice depend on rounding. Of equal probabilities, the lower index wins.

Losses (unweighted; the caller weights them):

* load balance, GShard (Lepikhin et al. 2020, Algorithm 1) in the scale of Switch Transformer (Fedus et
  al. 2021, equation 4): ``E * sum_e f_e * m_e``, with ``f_e`` the share of tokens whose first choice is e
  and ``m_e`` the mean probability of e. It is 1 when both are uniform.
* z-loss, ST-MoE (Zoph et al. 2022, equation 5): ``mean_t logsumexp(logits_t)**2``.

With several data ranks, each router routes its rank's tokens of a *global batch*: the ranks' tokens concatenated in rank
order. Counts cover the global batch, through one small exchange of integers per pass, so that any number of ranks decides
as one process would:

* ``f_e``, a count over all T tokens of the global batch. It carries no gradient, so each rank may use the sum.
* ``m_e = (1 / T) sum_t p_te`` is linear in the tokens: ``m_e = sum_r m_e^(r)``, where rank r adds up its own
  tokens and divides by the global T. A rank returns its share ``E * sum_e f_e * m_e^(r)``: the shares add up to
  the loss, and so do their gradients. The z-loss, a mean over tokens, is divided into shares in the same way.
* An expert's capacity applies to the global batch. First choices come before second ones, and tokens in global order: the
  number of assignments ahead of a rank's own follows from the counts by (rank, choice, expert).
* Noise is drawn for the global batch, and each rank takes its rows.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tierstore.accelerator import read, upload
from tierstore.moe.config import RouterConfig, RouterNoise
from tierstore.moe.dispatch import count_experts
from tierstore.moe.exchange import gather_counts
from tierstore.moe.products import count_chosen, multiplies_at_once, product
from tierstore.moe.seeds import keyed_generator
from tierstore.parallel import RankGroup
from tierstore.parallel.collectives import Charge


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The position of a forward pass in training: the same key draws the same noise."""

    step: int = 0
    micro: int = 0


@dataclass(frozen=True, slots=True)
class Routing:
    """The router's decisions in one pass.

    ``expert_TK``: int64, -1 where the assignment was dropped. ``weight_TK``: fp32 (or fp64), 0 where dropped. ``aux_loss``
    and ``z_loss``: this rank's shares of the losses, unweighted scalars. ``load_RE``: int64, on the CPU, the number of
    assignments that each expert got from each data rank. ``rank``: this data rank.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    aux_loss: Tensor
    z_loss: Tensor
    load_RE: Tensor
    rank: int = 0

    @property
    def load_E(self) -> Tensor:
        """The number of assignments that each expert got from all data ranks."""
        return self.load_RE.sum(dim=0)

    @property
    def own_load_E(self) -> Tensor:
        """The number of assignments that each expert got from this rank."""
        return self.load_RE[self.rank]


class Router(nn.Module):
    """Linear router with top-k choice. ``layer`` and ``seed`` key its noise.

    ``data``: the ranks that hold the global batch; with more than one, a forward pass is a collective, and ``charge``
    makes the context for waiting for the others.
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
            factor_TD = (1 + config.noise_std * (2 * self._noise(x_TD, key) - 1)).to(dtype)
            x_TD = x_TD * upload(factor_TD, x_TD.device)
        logits_TE = F.linear(x_TD, self.weight.to(dtype))
        probability_TE = logits_TE.softmax(dim=-1)
        expert_TK = self._top(probability_TE)
        tokens, count_RKE, first_E = self._counted(expert_TK)
        weight_TK = probability_TE.gather(1, expert_TK)
        if config.normalized:
            weight_TK = weight_TK / weight_TK.sum(dim=-1, keepdim=True)
        counted = max(1, tokens)
        aux_loss = config.experts * torch.dot(
            first_E.to(dtype) / counted, probability_TE.sum(dim=0) / counted
        )
        z_loss = logits_TE.logsumexp(dim=-1).square().sum() / counted
        rank = self._data.rank
        capacity = config.capacity(tokens)
        if capacity is not None:
            ahead_RKE = _ahead(count_RKE)
            dropped_TK = _overflow(expert_TK, upload(ahead_RKE[rank], x_TD.device), capacity)
            expert_TK = expert_TK.masked_fill(dropped_TK, -1)
            weight_TK = weight_TK.masked_fill(dropped_TK, 0)
            count_RKE = count_RKE.minimum((capacity - ahead_RKE).clamp_(min=0))
        return Routing(expert_TK, weight_TK, aux_loss, z_loss, count_RKE.sum(dim=1), rank)

    def choose(self, x_TD: Tensor) -> Tensor:
        """The experts (T, K) of each token of ``x_TD``, without noise and without dropping any."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        return self._top(F.linear(x_TD.to(dtype), self.weight.to(dtype)).softmax(dim=-1))

    def _top(self, probability_TE: Tensor) -> Tensor:
        # A stable sort keeps equal probabilities in index order; topk promises no order at all.
        ranked_TE = probability_TE.detach().sort(dim=-1, descending=True, stable=True).indices
        return ranked_TE[:, : self.config.top_k].contiguous()

    def _counted(self, expert_TK: Tensor) -> tuple[int, Tensor, Tensor]:
        """Returns the number of tokens in the global batch; the counts by (data rank, choice, expert), on the host; and the
        counts of first choices by expert. The host waits for the device here, and nowhere else in a pass.
        """
        tokens, top_k = expert_TK.shape
        experts = self.config.experts
        place_K = torch.arange(top_k, device=expert_TK.device) * experts
        count = count_experts((expert_TK + place_K).flatten(), top_k * experts)
        size = self._data.size
        if size > 1:
            own = torch.cat([count, count.new_full((1,), tokens)])
            all_Rn = gather_counts(own, self._data, self._charge)
            found_Rn = self._data.read(all_Rn)
            tokens = int(found_Rn[:, -1].sum())
            count, found = all_Rn[:, :-1], found_Rn[:, :-1]
        else:
            (found,) = read(count)
        first_E = count.reshape(size, top_k, experts)[:, 0].sum(dim=0)
        return tokens, found.reshape(size, top_k, experts), first_E

    def _noise(self, x_TD: Tensor, key: NoiseKey) -> Tensor:
        """This rank's rows of the noise that is drawn for the global batch, uniform in [0, 1)."""
        tokens = [x_TD.shape[0]]
        if self._data.size > 1:
            tokens = gather_counts(torch.tensor(tokens), self._data, self._charge).flatten().tolist()
        generator = keyed_generator(self.seed, "noise", key.step, key.micro, self.layer)
        noise_TD = torch.rand((sum(tokens), x_TD.shape[1]), generator=generator, dtype=torch.float32)
        start = sum(tokens[: self._data.rank])
        return noise_TD[start : start + x_TD.shape[0]]


def _ahead(count_RKE: Tensor) -> Tensor:
    """The number of assignments of the global batch that come before the first one of each (rank, choice, expert).

    First choices of all ranks come first, in token order, then second ones (GShard, section 2.2).
    """
    by_choice_KE = count_RKE.sum(dim=0)
    earlier_choices_KE = by_choice_KE.cumsum(dim=0) - by_choice_KE
    return count_RKE.cumsum(dim=0) - count_RKE + earlier_choices_KE


def _overflow(expert_TK: Tensor, ahead_KE: Tensor, capacity: int) -> Tensor:
    """The mask of assignments beyond ``capacity``. ``ahead_KE``: how many come before the first of each (choice, expert)."""
    tokens, top_k = expert_TK.shape
    experts = ahead_KE.shape[1]
    place_K = torch.arange(top_k, device=expert_TK.device) * experts
    group_N = (expert_TK + place_K).t().reshape(-1)  # (choice, expert), choices first
    order_N = group_N.argsort(stable=True)
    size = count_experts(group_N, top_k * experts)
    start = size.cumsum(0) - size
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(tokens * top_k, device=order_N.device) - start[group_N[order_N]]
    place_N += ahead_KE.reshape(-1)[group_N]
    return (place_N >= capacity).view(top_k, tokens).t()


# A layer's router and norm, applied to another layer's stream -----------------------------------------------


#: Number of tokens for testing a folded router, and the share of experts that it must choose like the router itself; the
#: rest allows for rounding, which can swap experts with almost equal scores.
_TRIED = 64
_AGREED = 0.97


@dataclass(frozen=True, slots=True, eq=False)
class LayerRouter:
    """The router of MoE layer ``layer`` and the ``norm`` before it, which is called with the residual stream (..., D).

    ``choose(router, x_TD)``: the experts (T, K) that ``router`` chooses for the norm's output, -1 for none.
    """

    layer: int
    norm: nn.Module
    router: nn.Module
    choose: Callable[[nn.Module, Tensor], Tensor]
    experts: int

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and buffers of norm and router."""
        return [*_tensors(self.norm), *_tensors(self.router)]

    @property
    def nbytes(self) -> int:
        """The bytes of ``tensors``."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def chosen(self, stream_TD: Tensor) -> Tensor:
        """The experts (T, K) of each token, -1 for none."""
        return self.choose(self.router, self.norm(stream_TD))

    def count(self, stream_BTD: Tensor, added_B1D: Tensor | None = None) -> Tensor:
        """How often each expert is chosen (E,) for the sum of ``stream_BTD`` and ``added_B1D``."""
        expert_TK = self.chosen(_expected(stream_BTD, added_B1D))
        expert_N = expert_TK.masked_fill(expert_TK < 0, self.experts).flatten()
        return count_experts(expert_N, self.experts + 1)[:-1]

    def copied(self) -> LayerRouter:
        """A copy in evaluation mode, with its own parameters and buffers."""
        return LayerRouter(self.layer, _twin(self.norm), _twin(self.router), self.choose, self.experts)

    def take(self, other: LayerRouter) -> None:
        """Copy the parameters and buffers of ``other``, of which this is a copy."""
        for old, new in zip(self.tensors, other.tensors, strict=True):
            old.copy_(new)

    def folded(self, dtype: torch.dtype) -> FoldedRouter | None:
        """One matrix that makes the choices of norm and router for streams of ``dtype``; None if that is not possible.

        It is possible if the norm only scales each token by a number and each feature by a constant, and the router is
        linear: the scale of a token does not change the order of scores, nor does a softmax or sigmoid. A trial on random
        tokens tells whether this holds for the modules.
        """
        tensors = _tensors(self.router)
        if len(tensors) != 1 or tensors[0].ndim != 2 or tensors[0].shape[0] != self.experts:
            return None
        weight_ED = tensors[0].detach()
        width = weight_ED.shape[1]
        scale_D = self.norm(weight_ED.new_ones(1, width, dtype=dtype))[0]
        folded_ED = (weight_ED * scale_D).to(dtype)
        generator = torch.Generator().manual_seed(self.layer)
        x_TD = torch.randn(_TRIED, width, generator=generator).to(weight_ED.device, dtype)
        expert_TK = self.chosen(x_TD)
        if expert_TK.min() < 0:
            return None
        made = FoldedRouter(folded_ED, expert_TK.shape[1])
        asked_TE, given_TE = (
            F.one_hot(each, self.experts).sum(dim=1) for each in (expert_TK, made.chosen(x_TD))
        )
        return made if int((asked_TE * given_TE).sum()) >= _AGREED * expert_TK.numel() else None


@dataclass(frozen=True, slots=True, eq=False)
class FoldedRouter:
    """Chooses the ``top_k`` experts whose rows of ``weight_ED`` have the largest dot products with the stream."""

    weight_ED: Tensor
    top_k: int

    @property
    def nbytes(self) -> int:
        """The bytes of the matrix."""
        return self.weight_ED.nbytes

    def chosen(self, stream_TD: Tensor) -> Tensor:
        """The experts (T, K) of each token."""
        score_TE = product(stream_TD.contiguous(), self.weight_ED)
        return score_TE.topk(self.top_k, dim=-1, sorted=False).indices

    def count(self, stream_BTD: Tensor, added_B1D: Tensor | None = None) -> Tensor:
        """How often each expert is chosen (E,) for the sum of ``stream_BTD`` and ``added_B1D``."""
        weight_ED = self.weight_ED
        streams = [stream_BTD] if added_B1D is None else [stream_BTD, added_B1D]
        alike = all(
            each.is_contiguous() and (each.shape, each.dtype) == (stream_BTD.shape, weight_ED.dtype)
            for each in streams
        )
        if alike and stream_BTD.shape[-1] == weight_ED.shape[1] and multiplies_at_once(weight_ED):
            return count_chosen(stream_BTD, added_B1D, weight_ED, self.top_k)
        expert_TK = self.chosen(_expected(stream_BTD, added_B1D))
        return count_experts(expert_TK.flatten(), len(weight_ED))


def _expected(stream_BTD: Tensor, added_B1D: Tensor | None) -> Tensor:
    expected_BTD = stream_BTD if added_B1D is None else stream_BTD + added_B1D
    return expected_BTD.reshape(-1, expected_BTD.shape[-1])


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _twin(module: nn.Module) -> nn.Module:
    """A copy of ``module`` in evaluation mode, with its own parameters and buffers, and without its hooks.

    Not a deep copy, which would copy the hooks and the objects that they refer to.
    """
    made = copy.copy(module)
    fields: dict[str, Any] = made.__dict__
    for name in list(fields):
        if name.endswith("_hooks") or "_hooks_" in name:
            fields[name] = OrderedDict()
    fields["_parameters"] = {
        name: None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)
        for name, value in module._parameters.items()
    }
    fields["_buffers"] = {
        name: None if value is None else value.detach().clone() for name, value in module._buffers.items()
    }
    fields["_modules"] = {
        name: None if child is None else _twin(child) for name, child in module._modules.items()
    }
    fields["training"] = False
    return made
