"""Dispatch sorts tokens by expert; combine brings the results back to token order.

Shapes: T tokens, K experts a token, N assignments that were not dropped (at most T * K), E experts, D width.

Combine sums over K in the router's order, so where and when an expert was computed cannot change a bit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tierstore.accelerator import upload


class RowOrder(Enum):
    """The order of the tokens of one expert."""

    #: Token order: rows that several ranks send are in the same order as in one process.
    TOKENS = "tokens"
    #: The order of an unstable ``torch.sort``, as in transformers, so that sums over rows have the same bits as there.
    SORTED = "sorted"


@dataclass(frozen=True, slots=True)
class Dispatch:
    """The row of each assignment in the sorted buffer.

    ``order_N``: the flat assignment (t * K + k) of each row. ``token_N``: its token. ``place_TK``: the row of each
    assignment, or N where it was dropped. ``offsets``: rows ``offsets[e]:offsets[e + 1]`` belong to expert e.
    """

    order_N: Tensor
    token_N: Tensor
    place_TK: Tensor
    offsets: tuple[int, ...]

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that got at least one token, ascending."""
        return tuple(e for e in range(len(self.offsets) - 1) if self.offsets[e] < self.offsets[e + 1])

    @property
    def rows(self) -> int:
        """N, the rows of the sorted buffer."""
        return self.offsets[-1]

    @property
    def most_rows(self) -> int:
        """The most rows of any expert."""
        pairs = zip(self.offsets[:-1], self.offsets[1:], strict=True)
        return max((stop - start for start, stop in pairs), default=0)

    def span(self, expert: int) -> slice:
        """The rows of ``expert``."""
        return slice(self.offsets[expert], self.offsets[expert + 1])


def count_experts(expert_N: Tensor, experts: int) -> Tensor:
    """How often each of 0 to ``experts`` - 1 occurs in the int64 ``expert_N``, which has no other values: (E,) int64.

    ``torch.bincount`` would make the host wait for the device.
    """
    return expert_N.new_zeros(experts).index_add_(0, expert_N, torch.ones_like(expert_N))


def dispatch(expert_TK: Tensor, load_E: Tensor, order: RowOrder = RowOrder.TOKENS) -> Dispatch:
    """Sort the assignments ``expert_TK`` (int64, -1 dropped) by expert; ``load_E``, on the CPU, counts them per expert."""
    tokens, top_k = expert_TK.shape
    offsets = [0]
    for load in load_E.tolist():
        offsets.append(offsets[-1] + load)
    sorted_N = expert_TK.flatten().sort(stable=order is RowOrder.TOKENS).indices
    order_N = sorted_N[tokens * top_k - offsets[-1] :]
    place_TK = torch.full((tokens * top_k,), offsets[-1], dtype=torch.int64, device=expert_TK.device)
    place_TK[order_N] = torch.arange(offsets[-1], device=expert_TK.device)
    token_N = torch.div(order_N, top_k, rounding_mode="floor")
    return Dispatch(order_N, token_N, place_TK.view(tokens, top_k), tuple(offsets))


def dispatch_token(expert_1K: Tensor, experts: int) -> Dispatch:
    """``dispatch`` of a single token with K different experts, in few operations, for decoding.

    Raises ValueError for an expert outside 0 to ``experts`` - 1.
    """
    chosen: list[int] = expert_1K[0].tolist()
    order = sorted(range(len(chosen)), key=chosen.__getitem__)
    if chosen[order[0]] < 0 or chosen[order[-1]] >= experts:
        raise ValueError(f"routed to experts {chosen} of {experts}")
    offsets, place = [0] * (experts + 1), [0] * len(chosen)
    for row, assignment in enumerate(order):
        place[assignment] = row
        offsets[chosen[assignment] + 1] = 1
    order_N = torch.tensor(order, device=expert_1K.device)
    place_1K = torch.tensor([place], device=expert_1K.device)
    return Dispatch(order_N, torch.zeros_like(order_N), place_1K, tuple(itertools.accumulate(offsets)))


def divide_experts(plan: Dispatch, load_SE: Tensor, rank: int, parts: int) -> tuple[Dispatch, Tensor]:
    """``plan`` with each expert's rows divided into ``parts``, each an expert of its own: ``e * parts`` and those after it
    for expert e. Also returns their loads (S, E * parts).

    ``load_SE``, on the CPU: the rows of each expert on each of S ranks, of which ``rank`` has ``plan``. Row i of an expert,
    counted over all ranks, goes to part ``i % parts``: so each rank has an equal share of each part, and what the parts are
    does not depend on how tokens are spread over ranks.
    """
    ends_SE = load_SE.cumsum(dim=0)
    starts_SE, part_P = ends_SE - load_SE, torch.arange(parts)
    before_SEP, until_SEP = (
        (row_SE.unsqueeze(-1) - part_P - 1).div(parts, rounding_mode="floor")
        for row_SE in (starts_SE, ends_SE)
    )
    load_SU = (until_SEP - before_SEP).flatten(1)
    own_E = load_SE[rank]
    first_E = starts_SE[rank] - (own_E.cumsum(dim=0) - own_E)
    row_N = torch.arange(plan.rows) + first_E.repeat_interleave(own_E)
    expert_N = torch.arange(len(own_E)).repeat_interleave(own_E)
    sorted_N = upload((expert_N * parts + row_N % parts).argsort(stable=True), plan.order_N.device)
    place_N = torch.empty(plan.rows + 1, dtype=torch.int64, device=plan.order_N.device)
    place_N[sorted_N] = torch.arange(plan.rows, device=place_N.device)
    place_N[plan.rows] = plan.rows
    offsets = itertools.accumulate(load_SU[rank].tolist(), initial=0)
    divided = Dispatch(plan.order_N[sorted_N], plan.token_N[sorted_N], place_N[plan.place_TK], tuple(offsets))
    return divided, load_SU


def combine(rows_ND: Tensor, place_TK: Tensor) -> Tensor:
    """``out[t] = sum_k rows[place[t, k]]``, k ascending. The last row must be zeros, for dropped assignments."""
    out_TD = rows_ND.index_select(0, place_TK[:, 0])
    for k in range(1, place_TK.shape[1]):
        out_TD += rows_ND.index_select(0, place_TK[:, k])
    return out_TD


def combine_weighted(rows_ND: Tensor, place_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """``out[t] = sum_k weight[t, k] * rows[place[t, k]]``, k ascending, in the type of the weights."""
    out_TD = rows_ND.index_select(0, place_TK[:, 0]).to(weight_TK.dtype) * weight_TK[:, :1]
    for k in range(1, place_TK.shape[1]):
        rows_TD = rows_ND.index_select(0, place_TK[:, k]).to(weight_TK.dtype)
        out_TD += rows_TD.mul_(weight_TK[:, k : k + 1])
    return out_TD.to(rows_ND.dtype)


def combine_outputs(rows_ND: Tensor, place_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """As :func:`combine_weighted`, with the bits of transformers' ``grouped_mm``.

    Products are rounded to the wider of the two types, and summed at least in fp32.
    """
    tokens, top_k = place_TK.shape
    weighted = rows_ND.index_select(0, place_TK.reshape(-1)) * weight_TK.reshape(-1, 1)
    return weighted.view(tokens, top_k, rows_ND.shape[1]).sum(dim=1).to(rows_ND.dtype)


def gradients_of_outputs(grad_TD: Tensor, plan: Dispatch, weight_TK: Tensor) -> Tensor:
    """The gradients (N, D) of the experts' outputs, in the type of ``grad_TD``."""
    weight_N = weight_TK.reshape(-1).index_select(0, plan.order_N)
    return (grad_TD.index_select(0, plan.token_N) * weight_N.unsqueeze(1)).to(grad_TD.dtype)


def gradients_of_weights(grad_TD: Tensor, plan: Dispatch, rows_ND: Tensor, weight_TK: Tensor) -> Tensor:
    """The gradients (N) of the router's weights, for expert outputs ``rows_ND``."""
    wide = torch.promote_types(grad_TD.dtype, weight_TK.dtype)
    products_ND = grad_TD.index_select(0, plan.token_N).to(wide) * rows_ND[: plan.rows]
    return products_ND.sum(dim=1).to(weight_TK.dtype)
