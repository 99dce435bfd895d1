"""What balances the experts of a transformers model: an auxiliary loss, or a bias on the choice, as the family has it.

Shapes: T tokens, K experts a token, E experts of a layer.

Families with neither (DeepSeek-V2) are not balanced. Padding takes no part: as in transformers with an attention mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tierstore.errors import ConfigError
from tierstore.hf.loading import LoadedModule
from tierstore.moe.exchange import gather_counts
from tierstore.parallel import RankGroup


class _RecordedPass:
    """What routers give in a forward pass, by layer; None where nothing is recorded.

    The hooks on a model hold this and not the model: a cycle would keep its memory until a collection of garbage.
    """

    def __init__(self) -> None:
        self.logits: dict[int, Tensor] | None = None

    def record(self, layer: int, router: nn.Module, arguments: Any, output: Any) -> None:
        """A hook of the router of ``layer``."""
        if self.logits is not None:  # not when a layer is computed again
            self.logits[layer] = output[0]


@dataclass(frozen=True, slots=True)
class RouterSums:
    """What routers give to the auxiliary loss. ``counts``: int64 (E + 1), assignments of each expert and rows, of all
    layers and data ranks; ``probability_E``: fp32, the sum of this rank's probabilities, with its graph.
    """

    counts: Tensor
    probability_E: Tensor


class AuxLoss:
    """The auxiliary loss of ``loaded`` over the global batch of ``ranks``, by transformers' own function of the family.

    ``weight``: None is that of its configuration; 0 for a family without such a loss.
    """

    def __init__(self, loaded: LoadedModule, weight: float | None, ranks: RankGroup) -> None:
        own = getattr(loaded.module, "router_aux_loss_coef", None)
        self.weight = 0.0
        if own is not None:
            self.weight = float(own if weight is None else weight)
        self._ranks = ranks
        self._module = loaded.module
        self._pass = _RecordedPass()
        self._recorded: tuple[Tensor, ...] = ()
        if self.weight:
            for layer, router in routers_of(loaded):
                router.register_forward_hook(partial(self._pass.record, layer))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Takes what the routers give in the forward pass within, for ``value``."""
        # Not transformers' output_router_logits: with masks for packed documents its loss fails.
        logits: dict[int, Tensor] = {}
        self._pass.logits = logits
        try:
            yield
        finally:
            self._pass.logits = None
        self._recorded = tuple(logits[layer] for layer in sorted(logits))

    @property
    def under_way(self) -> dict[int, Tensor] | None:
        """What has been recorded of the forward pass that is under way, by layer; None where none is recorded."""
        return self._pass.logits

    @under_way.setter
    def under_way(self, logits: dict[int, Tensor] | None) -> None:
        self._pass.logits = logits

    def value(self, mask_BT: Tensor | None) -> Tensor:
        """This rank's share of the loss of the last forward pass that was recorded, unweighted; ``mask_BT`` is that of its
        batch. A collective.
        """
        if self._ranks.size == 1:
            function = vars(sys.modules[type(self._module).__module__])["load_balancing_loss_func"]
            loss: Tensor = function(self._recorded, self.experts, self._module.num_experts_per_tok, mask_BT)
            return loss
        sums = self.sums(mask_BT)
        return balance_loss(sums.counts, sums.probability_E)

    @property
    def experts(self) -> int:
        """Experts of a layer."""
        return int(self._module.num_experts)

    def sums(self, mask_BT: Tensor | None) -> RouterSums:
        """What the layers here give to the loss, of the last forward pass that was recorded. A collective."""
        experts, top_k, logits = self.experts, self._module.num_experts_per_tok, self._recorded
        mask_T = None if mask_BT is None else mask_BT.flatten()
        rows = logits[0].shape[0] if mask_T is None else int(mask_T.sum())
        count_E = torch.zeros(experts, dtype=torch.int64, device=logits[0].device)
        probability_E = torch.zeros(experts, device=logits[0].device)
        for logits_TE in logits:
            routed_TE = logits_TE.softmax(dim=-1)
            chosen_TK = routed_TE.topk(top_k, dim=-1).indices
            wide_TE = routed_TE.float()
            if mask_T is not None:
                chosen_TK, wide_TE = chosen_TK[mask_T], wide_TE * mask_T.float().unsqueeze(-1)
            count_E += torch.bincount(chosen_TK.flatten(), minlength=experts)
            probability_E = probability_E + wide_TE.sum(dim=0)
        # Pieces of a batch of tasks may differ in rows.
        rows_1 = count_E.new_tensor([rows * len(logits)])
        counts = torch.cat([count_E, rows_1])
        if self._ranks.size > 1:
            counts = gather_counts(counts, self._ranks).sum(dim=0)
        return RouterSums(counts, probability_E)


def balance_loss(counts: Tensor, probability_E: Tensor) -> Tensor:
    """The auxiliary loss, or a share of it, with the operations of transformers' own.

    It is ``E * sum_e f_e * m_e`` over all layers and ranks, with ``f_e`` the part of the tokens that e got, which carries
    no gradient, and ``m_e`` its mean probability, which is linear in tokens and layers: whoever has some of them gives the
    sum of their probabilities, beside the ``counts`` of all (``RouterSums``).
    """
    rows = int(counts[-1])
    part_E = counts[:-1].to(probability_E) / rows
    share: Tensor = torch.sum(part_E * (probability_E / rows).unsqueeze(0)) * probability_E.numel()
    return share


def balance_loss_later(counts: Tensor, probability_E: Tensor) -> Tensor:
    """The same for layers before others, whose ``counts`` will be there when the backward pass begins: a zero until then
    (not finite where a probability is not), with the gradient of the loss.
    """
    apply: Any = _Later.apply
    later: Tensor = apply(probability_E, counts)
    return later


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probability_E: Tensor, counts: Tensor) -> Tensor:
        ctx.counts, ctx.like = counts, torch.zeros_like(probability_E)
        return probability_E.sum() * 0.0

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            # Linear: its gradient is the same wherever it is taken.
            anywhere = ctx.like.requires_grad_()
            loss = balance_loss(ctx.counts.to(anywhere.device), anywhere)
        return torch.autograd.grad(loss, anywhere, gradient)[0], None


def routers_of(loaded: LoadedModule) -> Iterator[tuple[int, nn.Module]]:
    """The router of every layer of experts. Raises ConfigError where there is none beside the experts."""
    layers = {id(experts): layer for layer, experts in loaded.experts_at.items()}
    for name, block in loaded.module.named_modules():
        layer = layers.get(id(getattr(block, "experts", None)))
        if layer is not None:
            router = getattr(block, "gate", None) or getattr(block, "router", None)
            if not isinstance(router, nn.Module):
                raise ConfigError(f"{name}: no router beside the experts")
            yield layer, router


class BiasBalance:
    """The biases on the choice of experts of ``module``, by which families without an auxiliary loss balance them.

    After a step, ``bias += speed * sign(mean load - load)`` (DeepSeek-V3 technical report, section 2.1.2); loads are
    those of all micro-batches and ranks.
    """

    def __init__(self, module: nn.Module, speed: float) -> None:
        self._biases = [
            value for name, value in module.named_buffers() if name.endswith("e_score_correction_bias")
        ]
        self._speed = speed
        self._loads: list[Tensor] | None = None

    def begin_step(self) -> None:
        """Forgets what was counted."""
        self._loads = None

    def count(self, loads: Sequence[Tensor]) -> None:
        """Takes the loads of a forward pass, one for each layer of experts."""
        if self._biases and self._speed:
            if len(loads) != len(self._biases):
                raise RuntimeError(f"{len(loads)} layers of experts were reached, of {len(self._biases)}")
            held = self._loads
            self._loads = list(loads) if held is None else [a + b for a, b in zip(held, loads, strict=True)]

    @torch.no_grad()
    def update(self) -> None:
        """An optimizer step has been taken."""
        if self._loads is not None:
            for bias, load in zip(self._biases, self._loads, strict=True):
                # In whole numbers: the mean load and the load, times the number of experts.
                direction = torch.sign(load.sum() - load * load.numel())
                bias.add_(direction.to(bias), alpha=self._speed)
        self._loads = None
