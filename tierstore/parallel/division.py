"""How one parameter is divided over tensor-parallel ranks. Imports no torch.

A parameter may be several matrices side by side: queries, keys and values, or gate and up. Each of these *blocks* is cut
by itself, and a rank's *part* is its pieces, block after block: of ``[Q0 Q1 | K0 K1 | V0 V1]`` rank 0 has ``[Q0 K0 V0]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """A parameter whose dimension ``dimension`` is ``blocks`` equal blocks, each cut into a piece for each rank."""

    dimension: int
    blocks: int = 1

    def part_shape(self, shape: Sequence[int], ranks: int) -> tuple[int, ...]:
        """What one of ``ranks`` ranks holds of a parameter of ``shape``. Raises ValueError where it cannot be cut so."""
        length, more = divmod(shape[self.dimension], self.blocks * ranks)
        if more:
            raise ValueError(
                f"expected a multiple of {self.blocks} x {ranks} in dimension {self.dimension} of {tuple(shape)}"
            )
        part = list(shape)
        part[self.dimension] = length * self.blocks
        return tuple(part)

    def pieces(self, length: int, rank: int, ranks: int) -> Iterator[slice]:
        """Where the part of ``rank`` lies along ``dimension``, of ``length`` elements in the whole parameter: one piece of
        each block, in the order in which they lie in the part.
        """
        block = length // self.blocks
        piece = block // ranks
        for number in range(self.blocks):
            start = number * block + rank * piece
            yield slice(start, start + piece)
