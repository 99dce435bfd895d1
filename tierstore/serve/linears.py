"""Dense products of few rows: each matrix is read once, at the speed of memory, with the bits of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tierstore.moe.products import multiplies_at_once, product


class FewRowsLinear(nn.Linear):
    """``nn.Linear`` in bf16 on a CPU, without bias and without gradients."""

    def forward(self, input: Tensor) -> Tensor:
        """``input`` (.., inputs) -> (.., outputs)."""
        # Of rows that lie apart torch may make a product for each sequence; another type it refuses.
        if input.dtype != self.weight.dtype or not input.is_contiguous():
            return super().forward(input)
        out_RN = product(input.view(-1, self.in_features), self.weight)
        return out_RN.view(*input.shape[:-1], self.out_features)


def quicken_linears(module: nn.Module) -> int:
    """Makes what can be of ``module``'s linear layers ``FewRowsLinear``, for passes without gradients; returns how many.
    Their parameters, names and hooks stay.
    """
    found = [
        linear
        for linear in module.modules()
        if type(linear) is nn.Linear
        and [name for name, _ in linear.named_parameters()] == ["weight"]
        and linear.weight.dtype == torch.bfloat16
        and linear.weight.is_contiguous()
        and multiplies_at_once(linear.weight)
    ]
    for linear in found:
        linear.__class__ = FewRowsLinear
    return len(found)
