"""What a store must hold, from first principles: no byte of it comes from the store.

AdamW with both betas 0, eps 1, weight decay 1 and learning rate 1 forgets: after a step with gradient g a record is

    weight = 0 * weight - g / (|g| + 1)        exp_avg = g        exp_avg_sq = g * g

in single precision, whatever it was before. So its content follows from the gradient alone, and gradients are noise
that follows from (seed, record, version). A version is the position, from 1, of the operation that stepped the
record; version 0 is its registration, with noise as its weight and zeros as its moments. Records without a gradient
stay as they are (``Inactive.SKIP``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tierstore.store import AdamWConfig, Inactive, RecordSchema, WeightFormat

#: The optimizer under which content follows from the last gradient.
FORGETFUL = AdamWConfig(betas=(0.0, 0.0), eps=1.0, weight_decay=1.0, inactive=Inactive.SKIP)
LEARNING_RATE = 1.0
_SIGN_AND_FRACTION = np.uint32(0x80FF_FFFF)
_EXPONENT = np.uint32(0x3F00_0000)


def gradient(seed: int, record: int, version: int, numel: int) -> NDArray[np.float32]:
    """Noise [numel] of magnitude 0.5 to 2, of any sign: products and quotients of it are normal numbers."""
    generator = np.random.Generator(np.random.SFC64([seed, record, version]))
    bits = generator.integers(0, 1 << 32, numel, np.uint32)
    bits &= _SIGN_AND_FRACTION
    bits |= _EXPONENT
    return bits.view(np.float32)


def content(seed: int, record: int, version: int, schema: RecordSchema) -> dict[str, NDArray[np.generic]]:
    """Every section of the record by name, as version ``version`` left it."""
    noise = gradient(seed, record, version, schema.numel)
    sections: dict[str, NDArray[np.generic]]
    if version:
        weight = np.abs(noise)
        weight += np.float32(1)
        np.divide(noise, weight, out=weight)
        np.negative(weight, out=weight)
        sections = {"exp_avg": noise, "exp_avg_sq": noise * noise}
    else:
        weight = noise
        zeros = np.zeros(schema.numel, np.float32)
        sections = {"exp_avg": zeros, "exp_avg_sq": zeros}
    if schema.weight_format is WeightFormat.FP32:
        return sections | {"weight": weight}
    bits = weight.view(np.uint32)
    # Magnitudes below 2 leave a bit for the carry, so rounding half away from zero is an addition to the bits.
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    low = (bits - (high << np.uint32(16))).astype(np.uint16).view(np.int16)
    return sections | {"weight_hi": high.astype(np.uint16), "weight_lo": low}


def wrong_bytes(found: NDArray[np.generic], expected: NDArray[np.generic]) -> int:
    """How many bytes differ; all of the longer one where the lengths do."""
    if found.nbytes != expected.nbytes:
        return max(found.nbytes, expected.nbytes)
    if found.nbytes % 8 == 0 and np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
        return 0
    return int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))


@dataclass
class StoreModel:
    """Which version every record is at: now, at the last commit, and at each retained snapshot (oldest first)."""

    seed: int
    versions: list[int]
    retain: int = 0
    generation: int = 0
    committed: list[int] = field(default_factory=list)
    snapshots: dict[str, list[int]] = field(default_factory=dict)

    def update(self, records: Iterable[int], version: int) -> None:
        """``records`` are stepped by the operation that makes ``version`` of them."""
        for record in records:
            self.versions[record] = version

    def commit(self, snapshot: str | None = None) -> None:
        """All so far is durable, and kept under the name ``snapshot``; the oldest snapshots go."""
        self.generation += 1
        self.committed = list(self.versions)
        if snapshot is not None:
            self.snapshots[snapshot] = list(self.versions)
            while len(self.snapshots) > self.retain:
                del self.snapshots[next(iter(self.snapshots))]

    def reopen(self) -> None:
        """What was not committed is gone."""
        self.versions = list(self.committed)

    def copies(self) -> int:
        """Records, of each version that is live, committed or in a snapshot, that cannot share their bytes."""
        tables: Sequence[list[int]] = [self.versions, self.committed, *self.snapshots.values()]
        return sum(len(set(versions)) for versions in zip(*(table for table in tables if table), strict=True))
