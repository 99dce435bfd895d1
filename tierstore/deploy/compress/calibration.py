"""What a text shows of a model's experts: how much each is used, and how alike their outputs are.

Shapes: N tokens, D width, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

from tierstore.deploy.compress.grouping import LayerUse
from tierstore.deploy.teacher import Teacher
from tierstore.model.spec import ModelSpec
from tierstore.moe.experts import Workspace, forward_expert
from tierstore.moe.source import ExpertLease

#: Tokens of each window whose outputs of all experts are compared.
SAMPLED = 64


class _Layer:
    """Sums over what a layer has seen."""

    def __init__(self, experts: int) -> None:
        self.weight_E = torch.zeros(experts, dtype=torch.float64)
        self.alike_EE = torch.zeros(experts, experts, dtype=torch.float64)
        self.samples = 0

    def use(self) -> LayerUse:
        uses_E = self.weight_E / self.weight_E.sum().clamp(min=1e-30)
        alike_EE = self.alike_EE / max(self.samples, 1)
        return LayerUse(tuple(uses_E.tolist()), tuple(tuple(row) for row in alike_EE.tolist()))


def calibrate(
    teacher: Teacher, windows: Iterable[Tensor], *, passed: Callable[[], None] = lambda: None
) -> dict[int, LayerUse]:
    """By layer, what ``teacher`` does with ``windows`` (each (T,)); ``passed`` is called behind each.

    Use is the sum of the routers' weights. Outputs are compared on some tokens of each window, of all experts, whoever was
    routed to them. Raises ChecksumError, OSError.
    """
    spec = teacher.spec
    layers = {layer: _Layer(spec.experts) for layer in spec.moe_layers}
    inputs: dict[int, Tensor] = {}

    def routed(layer: int, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> None:
        layers[layer].weight_E.index_add_(0, expert_NK.flatten(), weight_NK.flatten().double())
        inputs[layer] = x_ND[:: max(len(x_ND) // SAMPLED, 1)].clone()

    for window_T in windows:
        with teacher.watched(routed):
            teacher.logits(window_T[None])
        for layer, leases in teacher.leases(range(spec.experts)):
            _compare(spec, leases, inputs[layer], layers[layer])
        passed()
    return {layer: found.use() for layer, found in layers.items()}


@torch.no_grad()
def _compare(spec: ModelSpec, leases: Iterable[ExpertLease], x_ND: Tensor, into: _Layer) -> None:
    """Adds the cosines of all experts' outputs for ``x``."""
    work = Workspace(spec.expert_shape, len(x_ND), x_ND)
    out_END = x_ND.new_empty(spec.experts, *x_ND.shape)
    for lease in leases:
        inner_NP = work.inner(0, len(x_ND))
        forward_expert(spec.expert_shape, lease.weights, x_ND, inner_NP, out_END[lease.expert], work)
    unit_END = functional.normalize(out_END.float(), dim=-1)
    into.alike_EE += torch.einsum("and,bnd->ab", unit_END, unit_END).double()
    into.samples += len(x_ND)
