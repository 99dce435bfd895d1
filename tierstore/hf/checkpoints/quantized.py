"""Weights that checkpoints keep in few bits, as bf16: DeepSeek-V3's FP8 by blocks, and gpt-oss's MXFP4.

bf16 values are uint16 arrays of their bits. Both ways compute in fp32 and round once, to nearest even, as the models'
own code does; the bits are the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from tierstore.capabilities import require_package

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
    torch = require_package("torch", "reading weights")
    target = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    target.copy_(torch.from_numpy(values))


@cache
def _e4m3() -> npt.NDArray[np.float32]:
    """What each byte means as F8_E4M3."""
    torch = require_package("torch", "reading weights")
    values: npt.NDArray[np.float32] = (
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    )
    return values


@cache
def _mxfp4_pairs() -> npt.NDArray[np.uint32]:
    """What a scale and a byte make of its two nibbles, the low one first: two bf16 values, by ``scale << 8 | byte``."""
    nibbles = np.arange(256)[:, None] >> np.array([0, 4]) & 15
    values = np.where(nibbles & 8, -1.0, 1.0) * np.array(_E2M1)[nibbles & 7]
    with np.errstate(
        all="ignore"
    ):  # 2 ** 128 is infinite: weights that have it are refused when they are checked
        powers = np.ldexp(np.float32(1), np.arange(256) - 127)
        wide = (values.astype(np.float32) * powers[:, None, None]).reshape(-1)
    made = np.empty(wide.size, np.uint16)
    round_to_bf16(wide, made)
    return made.view(np.uint32)


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of ``weight_scale_inv`` of an FP8 matrix; its last blocks may be cut short."""
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def fp8_to_bf16(values: Bytes, scales: npt.NDArray[np.float32], out: Bits) -> None:
    """Rows of an FP8 matrix (R, C), the first of which begins a block; ``scales``: those of their blocks,
    (ceil(R / 128), ceil(C / 128)).
    """
    meant, columns = _e4m3(), values.shape[1]
    for number, row_scales in enumerate(scales):
        rows = slice(number * FP8_BLOCK, (number + 1) * FP8_BLOCK)
        wide = meant[values[rows]]  # several times as fast as torch's own conversion
        wide *= np.repeat(row_scales, FP8_BLOCK)[:columns]
        round_to_bf16(wide, out[rows])


def mxfp4_to_bf16(blocks: Bytes, scales: Bytes, out: Bits) -> None:
    """One expert's matrix: ``blocks`` (R, G, 16) and ``scales`` (R, G) become ``out`` (32 G, R), transposed as the model
    has it in memory.
    """
    rows, groups, _ = blocks.shape
    torch = require_package("torch", "reading weights")
    pairs, target = _mxfp4_pairs(), torch.from_numpy(out.view(np.int16))
    step = max(
        (1 << 20) // (groups * MXFP4_GROUP), 1
    )  # rows at once: what is made of them stays in the cache
    for first in range(0, rows, step):
        part = slice(first, first + step)
        index = (scales[part].astype(np.uint16) << 8)[:, :, None] | blocks[part]
        made = pairs[index].view(np.int16).reshape(-1, groups * MXFP4_GROUP)
        target[:, part] = torch.from_numpy(made).t()  # several times as fast as numpy
