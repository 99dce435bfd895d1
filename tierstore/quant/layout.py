"""The layout of quantised weights in a record, and conversion of flat fp32 weights to such bytes and back. Without torch.

A record's weights are parts, one after another: matrices, and values that stay fp32 (biases). A matrix of N rows (outputs)
and K columns (inputs) is stored as codes, N x ceil(K / 64) blocks of 64, followed by the fp32 numbers of its blocks. Each
array starts at a multiple of ``ALIGNMENT`` bytes; the gaps are zero. ``native/quant/quantize.hpp`` defines the value of a
code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore.errors import ConfigError, DataError

#: Weights of one block, which share a scale.
BLOCK = _native.QUANT_BLOCK
#: Arrays in a record start at multiples of this many bytes.
ALIGNMENT = 64


class CodeFormat(StrEnum):
    """Codes of 8 bits with a scale per block (1.06 bytes a weight), or of 4 bits with a scale and a least value (0.63)."""

    INT8 = "int8"
    INT4 = "int4"

    @property
    def native(self) -> _native.QuantFormat:
        """The kernels' enum value."""
        return _native.QuantFormat.INT8 if self is CodeFormat.INT8 else _native.QuantFormat.INT4

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return BLOCK if self is CodeFormat.INT8 else BLOCK // 2

    @property
    def block_floats(self) -> int:
        """Numbers stored with the codes of a block."""
        return 1 if self is CodeFormat.INT8 else 2


class PartKind(StrEnum):
    """The kind of a part of an expert's flat weights."""

    MATRIX = "matrix"  # (rows, columns) = (outputs, inputs)
    TRANSPOSED = "transposed"  # stored flat as (columns, rows); its codes are those of a MATRIX
    PLAIN = "plain"  # values that stay fp32


@dataclass(frozen=True)
class WeightPart:
    """``rows`` x ``columns`` values, which follow those of the part before. PLAIN parts have 1 row."""

    kind: PartKind
    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ConfigError(f"weight part: expected rows and columns, got {self.rows} x {self.columns}")

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class PartSpan:
    """The position of a part: its ``values`` in the flat weights; bytes of its ``codes`` and ``scales`` in the record.

    A PLAIN part has no codes, and its values in place of scales.
    """

    part: WeightPart
    values: slice
    codes: slice
    scales: slice


@dataclass(frozen=True)
class QuantizedLayout:
    """The layout of the weights of a class of records."""

    codes: CodeFormat
    parts: tuple[WeightPart, ...]

    @cached_property
    def numel(self) -> int:
        """The number of weights."""
        return sum(part.numel for part in self.parts)

    @cached_property
    def spans(self) -> tuple[PartSpan, ...]:
        """The position of each part."""
        spans: list[PartSpan] = []
        first = offset = 0
        for part in self.parts:
            blocks = part.rows * -(-part.columns // BLOCK)
            plain = part.kind is PartKind.PLAIN
            codes_end = offset + (0 if plain else blocks * self.codes.block_bytes)
            scales = _aligned(codes_end)
            end = scales + 4 * (part.numel if plain else blocks * self.codes.block_floats)
            values = slice(first, first + part.numel)
            spans.append(PartSpan(part, values, slice(offset, codes_end), slice(scales, end)))
            first, offset = values.stop, _aligned(end)
        return tuple(spans)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the weights of one record, gaps included."""
        return _aligned(self.spans[-1].scales.stop)

    def as_json(self) -> dict[str, object]:
        """The parts alone: the schema holds the format."""
        return {"parts": [[part.kind.value, part.rows, part.columns] for part in self.parts]}

    @classmethod
    def from_json(cls, codes: CodeFormat, parts: object) -> QuantizedLayout:
        """The inverse of ``as_json``. Raises TypeError, ValueError or ConfigError for anything else."""
        if not isinstance(parts, Sequence) or not parts:
            raise ValueError(f"parts: expected a list of [kind, rows, columns], got {parts!r}")
        made = tuple(WeightPart(PartKind(kind), int(rows), int(columns)) for kind, rows, columns in parts)
        return cls(codes, made)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def quantize(layout: QuantizedLayout, weights: Floats, into: Bytes, *, name: str) -> None:
    """Write all of ``into`` (``layout.nbytes``), a function of ``weights`` (flat) alone.

    Raises DataError naming ``name`` if a weight, or the spread of a block, is not finite.
    """
    if weights.shape != (layout.numel,) or into.shape != (layout.nbytes,):
        raise ValueError(
            f"expected {layout.numel} weights and {layout.nbytes} bytes, got {weights.shape} and {into.shape}"
        )
    end = 0
    for span in layout.spans:
        into[end : span.codes.start] = 0
        into[span.codes.stop : span.scales.start] = 0
        end = span.scales.stop
        values, scales = _values(span, weights), into[span.scales].view(np.float32)
        if span.part.kind is PartKind.PLAIN:
            finite = bool(np.isfinite(values).all())
            scales[:] = values.ravel()
        else:
            finite = _native.quantize(layout.codes.native, into[span.codes], scales, values)
        if not finite:
            raise DataError(
                f"{name}: has a weight that is not finite, or too large to be stored as {layout.codes.value}"
            )
    into[end:] = 0


def dequantize(layout: QuantizedLayout, data: Bytes) -> Floats:
    """Decode ``data`` to flat fp32 weights."""
    weights = np.empty(layout.numel, np.float32)
    for span in layout.spans:
        part, target, scales = span.part, weights[span.values], data[span.scales].view(np.float32)
        if part.kind is PartKind.PLAIN:
            target[:] = scales
            continue
        matrix = np.empty((part.rows, part.columns), np.float32)
        _native.dequantize(layout.codes.native, matrix, data[span.codes], scales)
        target[:] = matrix.T.ravel() if part.kind is PartKind.TRANSPOSED else matrix.ravel()
    return weights


def _values(span: PartSpan, weights: Floats) -> Floats:
    """The part as (outputs, inputs), contiguous."""
    part, flat = span.part, weights[span.values]
    if part.kind is PartKind.TRANSPOSED:
        return np.ascontiguousarray(flat.reshape(part.columns, part.rows).T)
    return np.ascontiguousarray(flat.reshape(part.rows, part.columns))
