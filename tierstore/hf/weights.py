"""Reads the weights of a checkpoint in a record's form: fp32, or bf16 if the checkpoint is no more precise. Refuses NaN.

Quantised weights (DeepSeek-V3's FP8 by blocks, gpt-oss's MXFP4) become bf16: both conversions compute in fp32 and round
once, to nearest even, as the models' own code does, with the same bits. bf16 values are uint16 arrays of their bits.

A *part* is a tensor, or one row of a tensor that has all experts of a layer. Parts are read in chunks, through the
reading thread's own memory; beside the caller's arrays, no more than a chunk is held.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierstore import _native
from tierstore.errors import DataError
from tierstore.hf.checkpoint import TensorInfo, TensorReader
from tierstore.hf.families import Part

# Quantised weights ------------------------------------------------------------------------------------------


#: Rows and columns that share one scale of an FP8 matrix.
FP8_BLOCK = 128
#: Values that share one scale of MXFP4.
MXFP4_GROUP = 32
#: The sixteen values of E2M1: a sign, two bits of exponent, one of fraction.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def round_bf16(values: Floats, out: Bits | None = None) -> Bits:
    """The nearest bf16 of each value, ties to even, written to ``out`` where given; NaN stays NaN."""
    bits = np.empty(values.shape, np.uint16) if out is None else out
    target = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    target.copy_(torch.from_numpy(values))
    return bits


def widen_bf16(bits: Bits) -> Floats:
    """The fp32 values (flat) of flat bf16 ones."""
    wide = np.empty(bits.size, np.float32)
    _native.widen_bf16(wide, bits)
    return wide


@cache
def _e4m3() -> Floats:
    """The value of each byte as F8_E4M3."""
    values: Floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    return values


@cache
def _mxfp4_pairs() -> npt.NDArray[np.uint32]:
    """The two bf16 values of a byte's nibbles under a scale, low nibble first, at index ``scale << 8 | byte``."""
    nibbles = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    values = np.where(nibbles & 8, -1.0, 1.0) * np.array(_E2M1)[nibbles & 7]
    # 2 ** 128 is infinite: weights that have it are refused when they are checked.
    with np.errstate(all="ignore"):
        powers = np.ldexp(np.float32(1), np.arange(256) - 127)
        wide = (values.astype(np.float32) * powers[:, None, None]).reshape(-1)
    return round_bf16(wide).view(np.uint32)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of ``weight_scale_inv`` of an FP8 matrix; its last blocks may be cut short."""
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def fp8_to_bf16(values: Bytes, scales: Floats, out: Bits) -> None:
    """Rows of an FP8 matrix (R, C), the first of which begins a block; ``scales``: those of their blocks,
    (ceil(R / 128), ceil(C / 128)).
    """
    meant, columns = _e4m3(), values.shape[1]
    for number, row_scales in enumerate(scales):
        rows = slice(number * FP8_BLOCK, (number + 1) * FP8_BLOCK)
        wide = meant[values[rows]]  # several times as fast as torch's own conversion
        wide *= np.repeat(row_scales, FP8_BLOCK)[:columns]
        round_bf16(wide, out[rows])


def mxfp4_to_bf16(blocks: Bytes, scales: Bytes, out: Bits) -> None:
    """One expert's matrix: ``blocks`` (R, G, 16) and ``scales`` (R, G) become ``out`` (32 G, R), transposed as the model
    has it in memory.
    """
    rows, groups, _ = blocks.shape
    pairs, target = _mxfp4_pairs(), torch.from_numpy(out.view(np.int16))
    # Rows converted at once, so that the result stays in the cache.
    step = max((1 << 20) // (groups * MXFP4_GROUP), 1)
    for first in range(0, rows, step):
        part = slice(first, first + step)
        index = (scales[part].astype(np.uint16) << 8)[:, :, None] | blocks[part]
        made = pairs[index].view(np.int16).reshape(-1, groups * MXFP4_GROUP)
        target[:, part] = torch.from_numpy(made).t()  # several times as fast as numpy


# Reading ----------------------------------------------------------------------------------------------------


#: The unquantised types of weights, with their numpy types (bf16 as its bits).
PLAIN: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
SCALE_SUFFIX = "_scale_inv"
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"

_CHUNK_BYTES = 8 << 20
_CHECKED = 1 << 17  # values that are checked at once, few enough for the core's cache
_BF16_INFINITY = 0x7F80


class WeightReader:
    """Reads pieces of ``tensors``. Any number of threads may read."""

    def __init__(self, tensors: Mapping[str, TensorInfo], reader: TensorReader) -> None:
        self._tensors = tensors
        self._reader = reader

    def is_bf16(self, source: str) -> bool:
        """Whether ``source`` is exact as bf16: it is bf16 itself, or quantised to fewer bits."""
        info = self._tensors.get(source)
        return info is None or info.dtype in ("BF16", "F8_E4M3")

    def read_bf16(self, piece: Part, begin: int, end: int, out: Bits) -> None:
        """Values ``[begin, end)`` of a piece for which ``is_bf16``, as bits.

        Raises DataError naming the tensor when one of them is not finite, and when the file has been cut short; OSError.
        """
        info = self._tensors.get(piece.source)
        if info is None:
            self._read_mxfp4(piece, begin, end, out)
        elif info.dtype == "F8_E4M3":
            self._read_fp8(info, piece, begin, end, out)
        else:
            for low, high, values in self._chunks(info, piece, begin, end):
                out[low:high] = values
        check_bf16(out, piece.source)

    def read_fp32(self, piece: Part, begin: int, end: int, out: Floats) -> None:
        """Values ``[begin, end)`` of any piece. Raises as ``read_bf16``."""
        if self.is_bf16(piece.source):
            info = self._tensors.get(piece.source)
            if info is None or info.dtype != "BF16":
                bits = np.empty(end - begin, np.uint16)
                self.read_bf16(piece, begin, end, bits)
                _native.widen_bf16(out, bits)
                return
            for low, high, values in self._chunks(info, piece, begin, end):
                _native.widen_bf16(out[low:high], values)
        else:
            info = self._tensors[piece.source]
            for low, high, values in self._chunks(info, piece, begin, end):
                out[low:high] = values
        if not _native.all_finite(out):
            raise not_finite(piece.source, int(np.argmin(np.isfinite(out))))

    def _chunks(self, info: TensorInfo, piece: Part, begin: int, end: int) -> Any:
        """(low, high, values) of each chunk, counted from ``begin``."""
        kind = np.dtype(PLAIN[info.dtype])
        first = (piece.index or 0) * piece.numel
        step = _CHUNK_BYTES // kind.itemsize
        for low in range(begin, end, step):
            high = min(low + step, end)
            raw = self._reader.read(info, (first + low) * kind.itemsize, (first + high) * kind.itemsize)
            values = raw.view(kind)
            if not values.flags.aligned:
                values = values.copy()
            yield low - begin, high - begin, values

    def _raw(self, info: TensorInfo, begin: int, end: int) -> npt.NDArray[np.uint8]:
        return self._reader.read(info, begin * info.item_bytes, end * info.item_bytes)

    def _read_fp8(self, info: TensorInfo, piece: Part, begin: int, end: int, out: Bits) -> None:
        rows, columns = info.shape
        scale_info = self._tensors[piece.source + SCALE_SUFFIX]
        across = scale_info.shape[1]
        step = max(_CHUNK_BYTES // columns // FP8_BLOCK, 1) * FP8_BLOCK
        first = begin // columns // FP8_BLOCK * FP8_BLOCK
        last = -(-end // columns)
        for low in range(first, last, step):
            high = min(low + step, rows)
            blocks = (low // FP8_BLOCK, -(-high // FP8_BLOCK))
            raw_scales = self._raw(scale_info, blocks[0] * across, blocks[1] * across)
            scales = _as_fp32(raw_scales, scale_info.dtype).reshape(-1, across)
            values = self._raw(info, low * columns, high * columns).reshape(-1, columns)
            made = np.empty(values.shape, np.uint16)
            fp8_to_bf16(values, scales, made)
            flat = made.reshape(-1)
            at = low * columns
            wanted = slice(max(begin, at), min(end, at + flat.size))
            out[wanted.start - begin : wanted.stop - begin] = flat[wanted.start - at : wanted.stop - at]

    def _read_mxfp4(self, piece: Part, begin: int, end: int, out: Bits) -> None:
        if (begin, end) != (0, piece.numel) or piece.index is None:
            raise ValueError(f"{piece.source}: MXFP4 must be read by whole experts")
        blocks, scales = (self._tensors[piece.source + suffix] for suffix in (BLOCKS_SUFFIX, SCALES_SUFFIX))
        one = [info.nbytes // info.shape[0] for info in (blocks, scales)]
        at = piece.index
        raw_scales = self._raw(scales, at * one[1], (at + 1) * one[1]).copy()
        raw_blocks = self._raw(blocks, at * one[0], (at + 1) * one[0])
        mxfp4_to_bf16(
            raw_blocks.reshape(blocks.shape[1:]),
            raw_scales.reshape(scales.shape[1:]),
            out.reshape(piece.shape),
        )


def _as_fp32(raw: npt.NDArray[np.uint8], dtype: str) -> Floats:
    """A copy of small plain values."""
    values = raw.copy().view(PLAIN[dtype])
    return widen_bf16(values) if dtype == "BF16" else np.asarray(values, np.float32)


def check_bf16(values: Bits, name: str) -> None:
    """Raises DataError naming tensor ``name`` and the first of ``values`` that is NaN or infinite."""
    scratch = np.empty(min(values.size, _CHECKED), np.uint16)
    for start in range(0, values.size, _CHECKED):
        part = values[start : start + _CHECKED]
        magnitude = np.bitwise_and(part, np.uint16(0x7FFF), out=scratch[: part.size])
        if magnitude.max() >= _BF16_INFINITY:
            raise not_finite(name, start + int(np.argmax(magnitude >= _BF16_INFINITY)))


def not_finite(name: str, index: int) -> DataError:
    """The error for a weight that is NaN or infinite."""
    return DataError(
        f"tensor {name!r}: weight {index} of the part that was read is NaN or infinite; it cannot be trained"
    )
