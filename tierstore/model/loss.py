"""Cross entropy that never holds the logits of a whole batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# 16 Mi logits are 64 MiB in fp32. A constant: were it taken from a budget, the budget would change the sum.
CHUNK_LOGITS = 1 << 24


def cross_entropy(x_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Mean over T of ``-log softmax(x head^T)[target]``, fp32, in nats.

    Tokens go in chunks of at most CHUNK_LOGITS logits (whatever the vocabulary, at least one token). With
    more than one chunk, each computes its logits again in the backward pass.
    """
    tokens = x_TD.shape[0]
    rows = max(1, CHUNK_LOGITS // head_VD.shape[0])
    total = x_TD.new_zeros((), dtype=torch.promote_types(x_TD.dtype, torch.float32))
    for start in range(0, tokens, rows):
        part = slice(start, start + rows)
        if tokens > rows and torch.is_grad_enabled():
            total = total + checkpoint(_summed, x_TD[part], head_VD, targets_T[part], use_reentrant=False)
        else:
            total = total + _summed(x_TD[part], head_VD, targets_T[part])
    return total / tokens


def _summed(x_TD: Tensor, head_VD: Tensor, targets_T: Tensor) -> Tensor:
    logits_TV = F.linear(x_TD, head_VD.to(x_TD.dtype))
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    return F.cross_entropy(logits_TV.to(wide), targets_T, reduction="sum")
