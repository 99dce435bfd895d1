"""Flat fp32 weights to the bytes of a record, and back. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.errors import DataError
from tierstore.quant.layout import PartKind, PartSpan, QuantizedLayout

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def quantize(layout: QuantizedLayout, weights: Floats, into: Bytes, *, name: str) -> None:
    """Writes all of ``into`` (``layout.nbytes``): a function of ``weights`` (flat) alone.

    Raises DataError naming ``name`` for a weight, or the spread of a block, that is not finite.
    """
    if weights.shape != (layout.numel,) or into.shape != (layout.nbytes,):
        raise ValueError(
            f"expected {layout.numel} weights and {layout.nbytes} bytes, got {weights.shape} and {into.shape}"
        )
    end = 0
    for span in layout.spans:
        into[end : span.codes] = 0
        into[span.codes_end : span.scales] = 0
        end = span.scales_end
        values, scales = _values(span, weights), into[span.scales : end].view(np.float32)
        if span.part.kind is PartKind.PLAIN:
            finite = bool(np.isfinite(values).all())
            scales[:] = values.ravel()
        else:
            codes = into[span.codes : span.codes_end]
            finite = _native.quantize(layout.codes.native, codes, scales, values)
        if not finite:
            raise DataError(
                f"{name}: has a weight that is not finite, or too large to be kept as {layout.codes.value}"
            )
    into[end:] = 0


def dequantize(layout: QuantizedLayout, data: Bytes) -> Floats:
    """The flat fp32 weights that ``data`` stands for."""
    weights = np.empty(layout.numel, np.float32)
    for span in layout.spans:
        part = span.part
        scales = data[span.scales : span.scales_end].view(np.float32)
        target = weights[span.first : span.first + part.numel]
        if part.kind is PartKind.PLAIN:
            target[:] = scales
            continue
        matrix = np.empty((part.rows, part.columns), np.float32)
        _native.dequantize(layout.codes.native, matrix, data[span.codes : span.codes_end], scales)
        target[:] = matrix.T.ravel() if part.kind is PartKind.TRANSPOSED else matrix.ravel()
    return weights


def _values(span: PartSpan, weights: Floats) -> Floats:
    """The part as (outputs, inputs), contiguous."""
    part = span.part
    flat = weights[span.first : span.first + part.numel]
    if part.kind is PartKind.TRANSPOSED:
        return np.ascontiguousarray(flat.reshape(part.columns, part.rows).T)
    return np.ascontiguousarray(flat.reshape(part.rows, part.columns))
