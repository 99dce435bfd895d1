"""Products of several experts in one call: torch's own kernel, without a call of torch's for each (``native/torch``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore import _native

_TYPES = (torch.float32, torch.bfloat16)


def multiplies_at_once(like: Tensor) -> bool:
    """Whether ``multiply_at_once`` takes matrices of the type and on the device of ``like``."""
    return like.device.type == "cpu" and like.dtype in _TYPES and _products() is not None


def multiply_at_once(
    out_RN: Tensor,
    out_first: Sequence[int],
    x_RK: Tensor,
    x_first: Sequence[int],
    rows: Sequence[int],
    weights: Sequence[int],
) -> None:
    """``out[o:o + r] = x[f:f + r] W^T`` for each product, bit for bit as by ``torch.mm``: ``o``, ``f`` and ``r`` of
    ``out_first``, ``x_first`` and ``rows``. ``weights``: addresses of contiguous (N, K) matrices of the same type.
    """
    products = _products()
    assert products is not None
    products.multiply(_array(out_RN), out_first, _array(x_RK), x_first, rows, weights)


def product(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """``x W^T`` (R, N) of contiguous matrices of one type, bit for bit as by ``torch.mm``, without
    gradients, as fast as there is a way to.
    """
    if not multiplies_at_once(w_NK):
        return x_RK @ w_NK.T
    out_RN = x_RK.new_empty(len(x_RK), len(w_NK))
    multiply_at_once(out_RN, (0,), x_RK, (0,), (len(x_RK),), (w_NK.data_ptr(),))
    return out_RN


@functools.cache
def _products() -> _native.TorchProducts | None:
    """None where this build of torch does not offer what they need."""
    try:
        return _native.TorchProducts(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except RuntimeError:
        return None


def _array(matrix: Tensor) -> Any:
    """bf16's bits, or fp32: which of both, mypy cannot know."""
    plain = matrix.detach()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()
