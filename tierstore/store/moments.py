"""Moments from one format to another, record by record: for a store that is made over.

A conversion rounds to nearest, once; steps round by a hash instead (``native/optim/moments.hpp``), so that what they lose
has a mean of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Moment
from tierstore.store.format import MOMENT_BLOCK, MomentFormat, RecordSchema, moment_sections

Array = npt.NDArray[np.generic]
_MOMENTS = (Moment.EXP_AVG, Moment.EXP_AVG_SQ)


def convert_moments(schema: RecordSchema, sections: Sequence[Array], moments: MomentFormat) -> list[Array]:
    """All ``sections`` of a record of ``schema``, with its moments kept as ``moments``. To fp32 it is exact."""
    if schema.moments is moments:
        return list(sections)
    count = len(moment_sections(schema.moments, schema.numel))
    weights, kept = sections[:-count], sections[-count:]
    wide = [_decode(moment, kept[i::2], schema) for i, moment in enumerate(_MOMENTS)]
    narrow = [_encode(moment, wide[i], moments) for i, moment in enumerate(_MOMENTS)]
    return [*weights, *(part for parts in zip(*narrow, strict=True) for part in parts)]


def _decode(moment: Moment, parts: Sequence[Array], schema: RecordSchema) -> npt.NDArray[np.float32]:
    """``parts``: the values, and the scales if the format has them."""
    if schema.moments is MomentFormat.FP32:
        return parts[0].view(np.float32)
    wide = np.empty(schema.numel, np.float32)
    if schema.moments is MomentFormat.BF16:
        _native.decode_moment(moment, wide, parts[0].view(np.uint16))
    else:
        _native.decode_moment(moment, wide, (parts[0].view(np.uint8), parts[1].view(np.float32)))
    return wide


def _encode(moment: Moment, wide: npt.NDArray[np.float32], moments: MomentFormat) -> list[Array]:
    if moments is MomentFormat.FP32:
        return [wide]
    if moments is MomentFormat.BF16:
        rounded = np.empty(len(wide), np.uint16)
        _native.encode_moment(moment, rounded, wide)
        return [rounded]
    codes, scales = np.empty(len(wide), np.uint8), np.empty(-(-len(wide) // MOMENT_BLOCK), np.float32)
    _native.encode_moment(moment, (codes, scales), wide)
    return [codes, scales]
