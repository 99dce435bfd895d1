"""A model cut into segments of consecutive blocks. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tierstore.dense.layout import Narrow
from tierstore.errors import BudgetError, ConfigError
from tierstore.hf.manifest import Manifest
from tierstore.units import format_bytes


@dataclass(frozen=True)
class BlockBytes:
    """What one decoder block takes in memory, in bytes."""

    dense: int
    experts: int

    @property
    def whole(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Segment:
    """Blocks ``first`` to ``last``, and what they take, in bytes."""

    first: int
    last: int
    dense: int
    experts: int

    def as_json(self) -> dict[str, int]:
        return asdict(self)


def block_bytes(manifest: Manifest, expert_bytes: int) -> list[BlockBytes]:
    """Of each decoder block; the embedding counts with the first, the head with the last. ``expert_bytes``: of one."""
    dense = []
    for unit in manifest.units:
        narrow = sum(p.numel for p in unit.parameters if manifest.narrow(p) is Narrow.YES)
        dense.append(4 * (unit.numel - narrow) + 2 * narrow)
    embedding, *blocks, head = dense
    blocks[0] += embedding
    blocks[-1] += head
    return [
        BlockBytes(each, manifest.experts.count * expert_bytes * (layer in manifest.experts.layers))
        for layer, each in enumerate(blocks)
    ]


def balanced(sizes: Sequence[int], count: int) -> list[int]:
    """The first block of each of ``count`` segments, so that the largest is as small as can be; of equals, the first cut.

    Raises ConfigError for more segments than blocks.
    """
    total = len(sizes)
    if not 1 <= count <= total:
        raise ConfigError(f"segments: expected 1 to {total}, one for each block at most, got {count}")
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    # least[n]: the largest segment of the best cut of the first n blocks, so far into as many segments as rounds.
    least = [float(end) for end in ends]
    cuts = [[0] * (total + 1)]
    for _ in range(count - 1):
        best, cut = [float("inf")] * (total + 1), [0] * (total + 1)
        for n in range(1, total + 1):
            for k in range(1, n):
                worst = max(least[k], float(ends[n] - ends[k]))
                if worst < best[n]:
                    best[n], cut[n] = worst, k
        least = best
        cuts.append(cut)
    firsts, n = [], total
    for cut in reversed(cuts):
        n = cut[n]
        firsts.append(n)
    return firsts[::-1]


def fewest(sizes: Sequence[int], memory: int) -> int:
    """How many segments there are at least, where each fits ``memory``. Raises BudgetError for a block that does not."""
    if max(sizes) > memory:
        raise BudgetError(
            f"--memory: {format_bytes(memory)} do not hold one block; the minimum is {max(sizes)} bytes "
            f"({format_bytes(max(sizes))})"
        )
    count, filled = 1, 0
    for size in sizes:
        if filled + size > memory:
            count, filled = count + 1, 0
        filled += size
    return count


def cut(blocks: Sequence[BlockBytes], firsts: Sequence[int]) -> list[Segment]:
    """The segments that begin with the blocks ``firsts``. Raises ConfigError for one that is not there."""
    if list(firsts) != sorted(set(firsts)) or not firsts or firsts[0] != 0 or firsts[-1] >= len(blocks):
        raise ConfigError(
            f"--segments: expected first blocks ascending from 0, below {len(blocks)}, got {tuple(firsts)}"
        )
    ends = [*firsts[1:], len(blocks)]
    return [
        Segment(
            first,
            end - 1,
            sum(block.dense for block in blocks[first:end]),
            sum(block.experts for block in blocks[first:end]),
        )
        for first, end in zip(firsts, ends, strict=True)
    ]
