"""Quantised weights for computation: where they are stored, and products with them.

On the CPU products read the codes themselves (``native/quant``); on another device a matrix is first dequantised to the
compute type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tierstore import _native
from tierstore.errors import ConfigError
from tierstore.quant.layout import BLOCK, CodeFormat, QuantizedLayout

#: Codes that share a byte are this far apart.
_HALF = 16


@dataclass(frozen=True, slots=True)
class QuantizedWeights:
    """The weights of one expert: the bytes of its record, 1-D uint8. On the CPU ``products`` computes with them."""

    layout: QuantizedLayout
    data: Tensor
    products: _native.QuantProducts | None = None

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.shape != (self.layout.nbytes,):
            raise ValueError(
                f"expected {self.layout.nbytes} bytes, got {tuple(self.data.shape)} of {self.data.dtype}"
            )
        if self.data.device.type == "cpu" and self.products is None:
            raise ValueError("products: required on the CPU")

    def multiply(self, index: int, x_MK: Tensor, out_MN: Tensor) -> None:
        """``out = x W^T`` with part ``index``, a matrix; both are fp32 or bf16.

        On the CPU a row of ``out`` depends on its row of ``x`` alone: sums are fp32, in an order set by the matrix.
        """
        span = self.layout.spans[index]
        if self.products is None:
            torch.mm(x_MK, self.matrix(index, x_MK.dtype).t(), out=out_MN)
            return
        codes, scales = self.data[span.codes].numpy(), self.plain(index).numpy()
        # A slice of an expert's own rows is contiguous; others are copied.
        out = (
            out_MN
            if out_MN.is_contiguous()
            else torch.empty_like(out_MN, memory_format=torch.contiguous_format)
        )
        x = x_MK.contiguous()
        self.products.multiply(self.layout.codes.native, native_array(out), native_array(x), codes, scales)
        if out is not out_MN:
            out_MN.copy_(out)

    def plain(self, index: int) -> Tensor:
        """The fp32 numbers of part ``index``, 1-D: the scales of a matrix, or the values of a part without codes."""
        return self.data[self.layout.spans[index].scales].view(torch.float32)

    def matrix(self, index: int, dtype: torch.dtype) -> Tensor:
        """Part ``index``, a matrix, dequantised in fp32 and rounded to ``dtype``: (outputs, inputs), on the same device."""
        span = self.layout.spans[index]
        blocks = -(-span.part.columns // BLOCK)
        codes = self.data[span.codes].view(span.part.rows, blocks, -1)
        scales = self.plain(index).view(span.part.rows, blocks, -1, 1)
        if self.layout.codes is CodeFormat.INT8:
            weights = codes.view(torch.int8).float() * scales[:, :, 0]
        else:
            halves = codes.view(span.part.rows, blocks, -1, _HALF)
            both = torch.stack((halves & 15, halves >> 4), dim=3).view(span.part.rows, blocks, BLOCK)
            weights = both.float() * scales[:, :, 0] + scales[:, :, 1]
        return weights.view(span.part.rows, -1)[:, : span.part.columns].to(dtype)


#: An expert's weights: a flat tensor in the compute type, or quantised.
Weights = Tensor | QuantizedWeights


def plain_weights(weights: Weights) -> Tensor:
    """``weights`` for uses that need a flat tensor. Raises ConfigError if they are quantised."""
    if isinstance(weights, QuantizedWeights):
        raise ConfigError(
            f"experts in {weights.layout.codes.value} support only forward passes: they are not trained, and no gradient "
            "flows through them"
        )
    return weights


def native_array(matrix: Tensor) -> Any:
    """A view for native products: fp32, or the bits of bf16 (mypy cannot tell which). Raises ValueError for other types."""
    plain = matrix.detach()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.uint16).numpy()
    if plain.dtype != torch.float32:
        raise ValueError(f"native products: expected fp32 or bf16, got {plain.dtype}")
    return plain.numpy()
