"""Experts as sets of columns: hidden units whose order means nothing, so that two experts can be laid one upon the other.

Shapes: D width of the model, F width of an expert, W values of one column.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tierstore.moe.config import ExpertShape

#: Columns less alike than this are not averaged: the mean of two that do different things does neither.
LEAST_ALIKE = 0.5


def columns_of(shape: ExpertShape, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The columns (F, W) of an expert: what feeds the activation, its biases, and what leaves it; and the bias behind them,
    which belongs to none (empty without one).
    """
    views = shape.views(flat)
    gates = shape.inner_rows // shape.d_ff
    if not shape.activation.transposed:
        inner = views.inner.view(gates, shape.d_ff, shape.d_model).transpose(0, 1).flatten(1)
        return torch.cat([inner, views.down.T], 1), flat.new_empty(0)
    bias, end = views.inner_bias, views.down_bias
    assert bias is not None
    assert end is not None
    inner = views.inner.T.reshape(shape.d_ff, gates * shape.d_model)  # gate and up take turns
    return torch.cat([inner, bias.view(shape.d_ff, gates), views.down], 1), end


def expert_of(shape: ExpertShape, columns_FW: Tensor, bias: Tensor) -> Tensor:
    """The inverse of ``columns_of``: a flat expert."""
    gates, width = shape.inner_rows // shape.d_ff, shape.d_model
    flat = columns_FW.new_empty(shape.numel)
    views = shape.views(flat)
    inner, rest = columns_FW[:, : gates * width], columns_FW[:, gates * width :]
    if not shape.activation.transposed:
        views.inner.copy_(inner.view(shape.d_ff, gates, width).transpose(0, 1).reshape(-1, width))
        views.down.copy_(rest.T)
        return flat
    assert views.inner_bias is not None
    assert views.down_bias is not None
    views.inner.copy_(inner.reshape(-1, width).T)
    views.inner_bias.copy_(rest[:, :gates].reshape(-1))
    views.down.copy_(rest[:, gates:])
    views.down_bias.copy_(bias)
    return flat


def partners(base_FW: Tensor, other_FW: Tensor) -> tuple[Tensor, Tensor]:
    """For each column of ``base``, the column of ``other`` it goes with, each with one (int64 (F,)), and how alike they are
    (cosine, (F,)): greedily, the most alike first, ties by position.
    """
    alike_FF = functional.normalize(base_FW, dim=1) @ functional.normalize(other_FW, dim=1).T
    count = len(base_FW)
    order = torch.argsort(alike_FF.flatten(), descending=True, stable=True)
    rows, others = (order // count).tolist(), (order % count).tolist()
    chosen = [-1] * count
    taken = [False] * count
    left = count
    for row, other in zip(rows, others, strict=True):
        if chosen[row] < 0 and not taken[other]:
            chosen[row], taken[other] = other, True
            left -= 1
            if not left:
                break
    partner_F = torch.tensor(chosen)
    return partner_F, alike_FF.gather(1, partner_F[:, None])[:, 0]


def merge(shape: ExpertShape, experts: list[Tensor], uses: list[float]) -> Tensor:
    """One expert of several (flat, fp32): columns that go together become their mean, weighted by use. A column without a
    counterpart stays that of the expert that is used most, which is the first of equals.
    """
    first = max(range(len(experts)), key=lambda index: uses[index])
    base_FW, bias = columns_of(shape, experts[first])
    weight = max(uses[first], 1e-9)
    sum_FW, weight_F = base_FW * weight, torch.full((len(base_FW), 1), weight)
    bias_sum, bias_weight = bias * weight, weight
    for index, expert in enumerate(experts):
        if index == first or uses[index] <= 0:
            continue
        other_FW, other_bias = columns_of(shape, expert)
        partner_F, alike_F = partners(base_FW, other_FW)
        share_F = (alike_F >= LEAST_ALIKE).to(base_FW.dtype)[:, None] * uses[index]
        sum_FW += other_FW[partner_F] * share_F
        weight_F += share_F
        bias_sum, bias_weight = bias_sum + other_bias * uses[index], bias_weight + uses[index]
    return expert_of(shape, sum_FW / weight_F, bias_sum / bias_weight)
