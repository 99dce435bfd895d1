"""The router of a layer and the norm before it, as something that guesses: what would it choose for another layer's stream?

Shapes: T tokens, K experts a token, E experts, D width of the model.
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

from tierstore.moe.products import count_chosen, multiplies_at_once, product

#: Tokens that a folded router is tried with, and the share of their experts that it must choose as the router does: what is
#: left are neighbours that a type's rounding puts in another order.
_TRIED = 64
_AGREED = 0.97


@dataclass(frozen=True, slots=True, eq=False)
class LayerRouter:
    """The router of MoE layer ``layer`` and the ``norm`` before it, which is called with the residual stream (..., D).

    ``choose(router, x_TD)``: the experts (T, K) that a router of this kind takes for what the norm made, -1 for none.
    """

    layer: int
    norm: nn.Module
    router: nn.Module
    choose: Callable[[nn.Module, Tensor], Tensor]
    experts: int

    @property
    def tensors(self) -> list[Tensor]:
        """Parameters and buffers of both."""
        return [*_tensors(self.norm), *_tensors(self.router)]

    @property
    def nbytes(self) -> int:
        """What both hold."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def chosen(self, stream_TD: Tensor) -> Tensor:
        """The experts (T, K) of each token, -1 for none."""
        return self.choose(self.router, self.norm(stream_TD))

    def count(self, stream_BTD: Tensor, added_B1D: Tensor | None = None) -> Tensor:
        """How often each expert (E,) is chosen for ``stream_BTD``, to which ``added_B1D`` is added."""
        expert_TK = self.chosen(_expected(stream_BTD, added_B1D))
        return torch.bincount(expert_TK[expert_TK >= 0], minlength=self.experts)

    def copied(self) -> LayerRouter:
        """The same with parameters and buffers of its own, as it computes in evaluation."""
        return LayerRouter(self.layer, _twin(self.norm), _twin(self.router), self.choose, self.experts)

    def take(self, other: LayerRouter) -> None:
        """Copies the parameters of ``other``, of which this is a copy."""
        for old, new in zip(self.tensors, other.tensors, strict=True):
            old.copy_(new)

    def folded(self, dtype: torch.dtype) -> FoldedRouter | None:
        """One matrix that chooses, for streams of ``dtype``, what norm and router choose; None where there is none.

        A norm that divides each token by a number and multiplies each feature by its own leaves the order of a linear
        router's scores as it is, and so does a softmax or a sigmoid. Whether the modules are of such kinds is found out:
        both choose for the same random tokens.
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
    """Chooses the ``top_k`` experts whose rows of ``weight_ED`` have the largest products with the stream."""

    weight_ED: Tensor
    top_k: int

    @property
    def nbytes(self) -> int:
        """What the matrix holds."""
        return self.weight_ED.nbytes

    def chosen(self, stream_TD: Tensor) -> Tensor:
        """The experts (T, K) of each token."""
        score_TE = product(stream_TD.contiguous(), self.weight_ED)
        return score_TE.topk(self.top_k, dim=-1, sorted=False).indices

    def count(self, stream_BTD: Tensor, added_B1D: Tensor | None = None) -> Tensor:
        """How often each expert (E,) is chosen for ``stream_BTD``, to which ``added_B1D`` is added."""
        weight_ED = self.weight_ED
        streams = [stream_BTD] if added_B1D is None else [stream_BTD, added_B1D]
        alike = all(
            each.is_contiguous() and (each.shape, each.dtype) == (stream_BTD.shape, weight_ED.dtype)
            for each in streams
        )
        if alike and stream_BTD.shape[-1] == weight_ED.shape[1] and multiplies_at_once(weight_ED):
            return count_chosen(stream_BTD, added_B1D, weight_ED, self.top_k)
        expert_TK = self.chosen(_expected(stream_BTD, added_B1D))
        return torch.bincount(expert_TK.flatten(), minlength=len(weight_ED))


def _expected(stream_BTD: Tensor, added_B1D: Tensor | None) -> Tensor:
    expected_BTD = stream_BTD if added_B1D is None else stream_BTD + added_B1D
    return expected_BTD.reshape(-1, expected_BTD.shape[-1])


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _twin(module: nn.Module) -> nn.Module:
    """A module of its own parameters and buffers that computes what ``module`` does in evaluation, without its hooks.

    Not a deep copy: hooks, and what they refer to, would come along.
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
