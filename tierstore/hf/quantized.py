"""Weights that checkpoints keep in few bits, as bf16: DeepSeek-V3's FP8 by blocks, and gpt-oss's MXFP4.

bf16 values are uint16 arrays of their bits. Both ways compute in fp32 and round once, to nearest even, as the models'
own code does; the bits are the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.hf.packages import require

#: One scale of an FP8 matrix is for so many rows and columns.
FP8_BLOCK = 128
#: Values that share one scale of MXFP4.
MXFP4_GROUP = 32
#: The sixteen values of E2M1: a sign, two bits of exponent, one of fraction.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Bits = npt.NDArray[np.uint16]
Bytes = npt.NDArray[np.uint8]


def round_to_bf16(values: npt.NDArray[np.float32], out: Bits) -> None:
    """The nearest bf16 of each value, ties to even; NaN stays NaN."""
    torch = require("torch", "reading weights")
    target = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    target.copy_(torch.from_numpy(values))


def _e4m3_values() -> npt.NDArray[np.float32]:
    """What each byte means as F8_E4M3 (the finite variant: 0x7f and 0xff are NaN, nothing is infinite)."""
    byte = np.arange(256)
    exponent, fraction = (byte >> 3) & 15, byte & 7
    magnitude = np.where(
        exponent == 0, np.ldexp(fraction / 8.0, -6), np.ldexp(1.0 + fraction / 8.0, exponent - 7)
    )
    magnitude[(byte & 127) == 127] = np.nan
    return np.where(byte < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_values()
#: What both nibbles of each byte mean as E2M1, the low one first.
_E2M1_PAIRS = np.array(
    [
        [
            sign * _E2M1[nibble & 7]
            for nibble in (byte & 15, byte >> 4)
            for sign in ((-1.0 if nibble & 8 else 1.0),)
        ]
        for byte in range(256)
    ],
    np.float32,
)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of ``weight_scale_inv`` of an FP8 matrix; its last blocks may be cut short."""
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def fp8_to_bf16(values: Bytes, scales: npt.NDArray[np.float32], out: Bits) -> None:
    """Rows of an FP8 matrix (R, C), the first of which begins a block; ``scales``: those of their blocks,
    (ceil(R / 128), ceil(C / 128)).
    """
    columns = values.shape[1]
    for number, row_scales in enumerate(scales):
        rows = slice(number * FP8_BLOCK, (number + 1) * FP8_BLOCK)
        wide = _E4M3[values[rows]]
        wide *= np.repeat(row_scales, FP8_BLOCK)[:columns]
        round_to_bf16(wide, out[rows])


def mxfp4_to_bf16(blocks: Bytes, scales: Bytes, out: Bits) -> None:
    """One expert's matrix: ``blocks`` (R, G, 16) and ``scales`` (R, G) become ``out`` (32 G, R), transposed as the model
    has it in memory.
    """
    rows, groups, _ = blocks.shape
    powers = np.ldexp(
        np.float32(1), scales.astype(np.int32) - 127
    )  # 2 ** 128 is infinite, and is refused later
    made = np.empty((rows, groups * MXFP4_GROUP), np.uint16)
    step = max((1 << 20) // (groups * MXFP4_GROUP), 1)  # rows at once: 4 MiB of fp32
    for first in range(0, rows, step):
        part = slice(first, first + step)
        wide = _E2M1_PAIRS[blocks[part]].reshape(-1, groups, MXFP4_GROUP)
        with np.errstate(invalid="ignore"):
            wide *= powers[part, :, None]
        round_to_bf16(wide.reshape(-1, groups * MXFP4_GROUP), made[part])
    out[:] = made.T
