"""Which experts of a layer become one. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.deploy.config import Method


@dataclass(frozen=True)
class LayerUse:
    """What a calibration text showed of a layer of E experts.

    ``uses``: the routers' weights that each expert got, as a share of all; they add up to 1. ``alike``: E x E, how alike the
    outputs of two experts are for the same tokens (mean cosine).
    """

    uses: tuple[float, ...]
    alike: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        if len(self.alike) != len(self.uses) or any(len(row) != len(self.uses) for row in self.alike):
            raise ValueError(f"alike: expected {len(self.uses)} rows and columns")


Groups = tuple[tuple[int, ...], ...]


def groups_of(layer: LayerUse, count: int, method: Method) -> Groups:
    """``count`` groups of experts, each of which becomes one; in the order of their first expert, ascending within.

    Pruning: groups of one, the most used. Merging: again and again the two groups that lose the least by it become one;
    of equals, the first.
    """
    experts = range(len(layer.uses))
    if method is Method.PRUNE:
        order = sorted(experts, key=lambda expert: (-layer.uses[expert], expert))
        return tuple((expert,) for expert in sorted(order[:count]))
    groups = [[expert] for expert in experts]
    while len(groups) > count:
        pairs = [(one, other) for one in range(len(groups)) for other in range(one + 1, len(groups))]
        one, other = min(pairs, key=lambda pair: _loss(layer, groups[pair[0]], groups[pair[1]]))
        groups[one] += groups.pop(other)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _loss(layer: LayerUse, one: Sequence[int], other: Sequence[int]) -> float:
    """What is lost when two groups become one: how much their outputs differ, times the use of the less used."""
    pairs = [layer.alike[a][b] for a in one for b in other]
    differs = 1.0 - sum(pairs) / len(pairs)
    use = min(sum(layer.uses[a] for a in one), sum(layer.uses[b] for b in other))
    return differs * use
