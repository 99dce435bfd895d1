"""Which rows of a table a rank has, where its rows are divided over ranks (SE-MoE section 4.3). Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Slices are multiples of this many elements: 64 bytes in fp32, 32 in bf16. Then no vector kernel meets a tail.
SLICE_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class TableRows:
    """A table of ``rows`` rows of ``width`` elements in contiguous blocks over ``ranks`` ranks, all blocks of ``each`` rows:
    those behind the last row of the table are padding, and zero. The last ranks may have padding alone.
    """

    rows: int
    width: int
    ranks: int

    @property
    def each(self) -> int:
        """Rows that one rank holds, padding included: whole rows whose elements are a multiple of SLICE_ALIGNMENT."""
        step = SLICE_ALIGNMENT // math.gcd(SLICE_ALIGNMENT, self.width)
        return -(-self.rows // (self.ranks * step)) * step

    def owned(self, rank: int) -> range:
        """The rows of ``rank``, without padding."""
        return range(min(rank * self.each, self.rows), min((rank + 1) * self.each, self.rows))

    def owner(self, row: int) -> int:
        """The rank that holds ``row``. Raises ValueError if there is none such."""
        if not 0 <= row < self.rows:
            raise ValueError(f"expected a row of 0 to {self.rows - 1}, got {row}")
        return row // self.each
