"""AdamW on records: hyperparameters, the history of steps, and the replay of missed steps.

Dense AdamW moves a parameter even when its gradient is zero (momentum and decoupled weight decay), so an
expert that no token reached must still move. ``Inactive.EXACT`` replays the steps it missed, with each step's
own learning rate and bias correction, in one pass over its record when it is next needed: bit-identical to
having stepped it every time. ``Inactive.SKIP`` drops them, which is what torch does for ``grad is None``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Moment
from tierstore.config import check_least, check_positive, key
from tierstore.errors import ConfigError, StoreError, StoreFormatError
from tierstore.store.format import MOMENT_BLOCK, MomentFormat, RecordSchema, moment_sections

#: The name of the commit's state with the history of steps.
HISTORY_KEY = "adamw-history"
Row = npt.NDArray[np.float32]
ROW_COLUMNS = 7


class Inactive(Enum):
    """The effect of an optimizer step on a record without a gradient."""

    EXACT = "exact"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW with torch's names and formula: decoupled decay, bias correction. The learning rate comes with each step."""

    betas: tuple[float, float] = key((0.9, 0.95), "decay rates of the two moments")
    eps: float = key(1e-8, "added to the root of the second moment")
    weight_decay: float = key(0.1, "decoupled decay")
    inactive: Inactive = key(
        Inactive.EXACT, "experts that no token reached: step them with a zero gradient, or skip them"
    )
    moments: MomentFormat = key(
        MomentFormat.FP32,
        "experts' moments: records of 12, 8 or 6 bytes a parameter (fixed when the store is created)",
    )

    def __post_init__(self) -> None:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas: expected two numbers from 0 to below 1, got {self.betas}")
        check_positive(self, "eps")
        check_least(self, 0, "weight_decay")

    def row(self, lr: float, step: int) -> Row:
        """The hyperparameters of optimizer step ``step`` (from 1) for the kernels, float32 [7].

        lr, beta1, beta2, eps, weight_decay, 1 - beta1**step, sqrt(1 - beta2**step); computed in double
        precision and rounded once.
        """
        if step < 1:
            raise ValueError(f"AdamW counts its steps from 1, got {step}")
        beta1, beta2 = self.betas
        correction1, correction2 = 1 - beta1**step, math.sqrt(1 - beta2**step)
        return np.array([lr, beta1, beta2, self.eps, self.weight_decay, correction1, correction2], np.float32)


class StepHistory:
    """The rows (28 bytes each) of the optimizer steps that some record may still have to replay.

    ``applied`` is the last step that the whole model has taken. A step in progress is ``applied + 1``: ``begin`` gives it a
    row, ``finish`` makes it the last applied one, ``abandon`` drops it.
    """

    def __init__(self, config: AdamWConfig) -> None:
        self.config = config
        self.applied = 0
        self._first = 1  # the step of _rows[0]
        self._rows: list[Row] = []
        #: The number of records that have taken the open step.
        self.taken = 0

    def begin(self, lr: float) -> int:
        """Opens step ``applied + 1`` with learning rate ``lr``; returns its number. Raises StoreError if one is open."""
        if self.is_open:
            raise StoreError(f"optimizer step {self.current} is open already: finish or abandon it first")
        self._rows.append(self.config.row(lr, self.applied + 1))
        self.taken = 0
        return self.current

    @property
    def is_open(self) -> bool:
        """Whether a step is in progress."""
        return len(self._rows) > self.applied + 1 - self._first

    @property
    def current(self) -> int:
        """The number of the open step. Raises StoreError if none is."""
        if not self.is_open:
            raise StoreError("no optimizer step is open: steps are taken inside store.optimizer_step(lr)")
        return self.applied + 1

    def finish(self) -> None:
        """Marks the open step as applied: records without a gradient in it have now missed it."""
        self.applied = self.current

    def abandon(self) -> None:
        """Drops the open step, if there is one."""
        del self._rows[self.applied + 1 - self._first :]

    @property
    def replays(self) -> bool:
        """Whether a record without a gradient must replay the step later."""
        return self.config.inactive is Inactive.EXACT

    def missed(self, reached: int) -> int:
        """The number of applied steps that a record at step ``reached`` must replay before it is used."""
        return self.applied - reached if self.replays else 0

    def rows(self, reached: int, through: int) -> Row:
        """Rows of the steps after ``reached`` up to ``through``, float32 [through - reached, 7]."""
        begin, end = reached + 1 - self._first, through + 1 - self._first
        if begin < 0 or end > len(self._rows):
            raise ValueError(f"steps {reached + 1}..{through} are not in the history")
        if end == begin + 1:  # the most frequent case: no step was missed
            return self._rows[begin][None]
        return np.stack(self._rows[begin:end]) if end > begin else np.empty((0, ROW_COLUMNS), np.float32)

    def step_rows(self, reached: int, step: int) -> tuple[Row, int]:
        """The rows for stepping a record with a gradient to step ``step``, and the record's step afterwards.

        EXACT: the missed steps, then that step. SKIP: one row, bias-corrected by the record's own count. Raises
        StoreError if the record has taken the step already.
        """
        if self.replays:
            if reached >= step:
                raise StoreError(f"a record at optimizer step {reached} cannot take step {step}")
            rows, reached = self.rows(reached, step), step
        else:
            lr = float(self.rows(step - 1, step)[0, 0])
            rows, reached = self.config.row(lr, reached + 1)[None], reached + 1
        self.taken += step > self.applied
        return rows, reached

    def forget_before(self, reached: int) -> None:
        """Drops the rows that no record needs: the least advanced record is at step ``reached``."""
        unneeded = max(min(reached, self.applied) + 1 - self._first, 0)
        del self._rows[:unneeded]
        self._first += unneeded

    _HEAD = struct.Struct("<qqd")  # applied, first step, and an unused number

    def pack(self) -> bytes:
        """The applied steps (an open one is not part of a commit), rows as float32 [n, 7]."""
        applied = self._rows[: self.applied + 1 - self._first]
        rows = np.stack(applied) if applied else np.empty((0, ROW_COLUMNS), np.float32)
        return self._HEAD.pack(self.applied, self._first, 0.0) + rows.astype("<f4").tobytes()

    def unpack(self, data: bytes) -> None:
        """Restores the output of ``pack``. Raises StoreFormatError."""
        try:
            self.applied, self._first, _ = self._HEAD.unpack_from(data)
            rows = np.frombuffer(data, "<f4", offset=self._HEAD.size).reshape(-1, ROW_COLUMNS)
        except (struct.error, ValueError) as error:
            raise StoreFormatError(f"the history of optimizer steps is damaged: {error}") from error
        self._rows = [np.array(row, np.float32) for row in rows]
        if self._first < 1 or len(rows) != self.applied + 1 - self._first:
            raise StoreFormatError(
                f"the history of optimizer steps is damaged: {len(rows)} rows from step {self._first}, "
                f"{self.applied} applied"
            )

    def oldest(self, reached: Sequence[int] | npt.NDArray[np.int64]) -> int:
        """The least step in ``reached`` that still matters."""
        return int(np.min(reached)) if self.replays and len(reached) else self.applied


Array = npt.NDArray[np.generic]
_MOMENTS = (Moment.EXP_AVG, Moment.EXP_AVG_SQ)


def convert_moments(schema: RecordSchema, sections: Sequence[Array], moments: MomentFormat) -> list[Array]:
    """All ``sections`` of a record of ``schema``, with its moments converted to ``moments`` (to fp32 exactly).

    A conversion rounds to nearest, once; steps round by a hash instead (``native/optim/moments.hpp``), so that their
    rounding errors have a mean of zero.
    """
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
