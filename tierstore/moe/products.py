"""Operations for which torch needs many calls, each in one call (``native/torch``): products of several experts, by torch's
own kernel, and the guesses of routers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tierstore import _native
from tierstore.capabilities import has_amx
from tierstore.quant.weights import native_array

_TYPES = (torch.float32, torch.bfloat16)


def multiplies_at_once(like: Tensor) -> bool:
    """Whether ``multiply_at_once`` takes matrices of the type and on the device of ``like``."""
    return like.device.type == "cpu" and like.dtype in _TYPES and _products() is not None


def compiles_products(like: Tensor) -> bool:
    """Whether oneDNN compiles a product of matrices like ``like`` for each shape, and computes it in tiles of AMX."""
    return like.device.type == "cpu" and like.dtype == torch.bfloat16 and has_amx()


def slow_products(dtype: torch.dtype, device: torch.device) -> str | None:
    """A warning if ``device`` is a CPU on which torch has no fast products of bf16 matrices, and ``dtype`` is bf16."""
    if device.type != "cpu" or dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return (
        "warning: this processor lacks AVX-512, without which torch multiplies bf16 matrices some hundred times slower "
        "than fp32 ones; use fp32 (model.compute_dtype, or tierstore import --compute fp32)"
    )


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
    products.multiply(native_array(out_RN), out_first, native_array(x_RK), x_first, rows, weights)


def product(x_RK: Tensor, w_NK: Tensor) -> Tensor:
    """``x W^T`` (R, N) of contiguous matrices of one type, bit for bit as by ``torch.mm``, without gradients, in the
    fastest available way.
    """
    if not multiplies_at_once(w_NK) or x_RK.shape[1] != w_NK.shape[1]:
        return x_RK @ w_NK.T  # which refuses other widths
    out_RN = x_RK.new_empty(len(x_RK), len(w_NK))
    multiply_at_once(out_RN, (0,), x_RK, (0,), (len(x_RK),), (w_NK.data_ptr(),))
    return out_RN


def count_chosen(x: Tensor, added: Tensor | None, w_NK: Tensor, top_k: int) -> Tensor:
    """How often (N,) each row of ``w_NK`` has one of the ``top_k`` largest products with a row of ``x + added`` (.., K);
    ties go to the first. All of one type, contiguous and without gradients; requires ``multiplies_at_once``.
    """
    products = _products()
    assert products is not None
    counts_N = torch.zeros(len(w_NK), dtype=torch.int64)
    width = w_NK.shape[1]
    addresses = x.data_ptr(), 0 if added is None else added.data_ptr(), w_NK.data_ptr()
    is_bf16 = x.dtype == torch.bfloat16
    products.count_chosen(is_bf16, x.numel() // width, width, *addresses, top_k, counts_N.numpy())
    return counts_N


def fade_towards(mean: Tensor, now: Tensor, before: Tensor, decay: float) -> None:
    """Set ``mean`` to ``decay * mean + (1 - decay) * (now - before)``, all of one shape."""
    kind = mean.shape, mean.dtype
    plain = mean.device.type == "cpu" and mean.dtype in _TYPES
    if plain and all(
        each.is_contiguous() and (each.shape, each.dtype) == kind for each in (mean, now, before)
    ):
        addresses = mean.data_ptr(), now.data_ptr(), before.data_ptr()
        _native.fade_towards(mean.dtype == torch.bfloat16, mean.numel(), decay, *addresses)
    else:
        mean.lerp_(now - before, 1 - decay)


@functools.cache
def _products() -> _native.TorchProducts | None:
    """None if this build of torch lacks the kernels."""
    try:
        return _native.TorchProducts(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except RuntimeError:
        return None
