"""Where nodes end, and whether expert groups lie on them so that an exchange can be hierarchical.

Ranks are numbered node by node, as ``torchrun`` numbers them: rank r is on node r // node_ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.environment import RankEnvironment


@dataclass(frozen=True, slots=True)
class NodeGrid:
    """An expert group as ``nodes`` x ``each``: ``each`` of its ranks, neighbours by number, on each of its nodes."""

    nodes: int
    each: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.each

    def neighbours(self, ranks: Sequence[int]) -> list[list[int]]:
        """Of a group's ``ranks``, those of each node."""
        return [list(ranks[first : first + self.each]) for first in range(0, self.ranks, self.each)]

    def rails(self, ranks: Sequence[int]) -> list[list[int]]:
        """Of a group's ``ranks``, those of each place: one rank of every node."""
        return [list(ranks[place :: self.each]) for place in range(self.each)]


def ranks_of_a_node(config: ParallelConfig, environment: RankEnvironment) -> int:
    """Ranks of a node; all of the world's where neither the configuration nor ``torchrun`` says it."""
    return config.node_ranks or environment.local_world or environment.world


def node_grid(groups: Sequence[Sequence[int]], node_ranks: int) -> NodeGrid | str:
    """How each of the expert ``groups`` (ranks of the world, ascending) lies on nodes of ``node_ranks`` ranks; the reason
    where that leaves nothing to do in two steps, or is not the same for all nodes.
    """
    size = len(groups[0])
    spreads = {tuple(_counts([rank // node_ranks for rank in group])) for group in groups}
    if all(len(counts) == 1 for counts in spreads):
        return f"each expert group of {size} is within one node of {node_ranks} ranks"
    if len(spreads) > 1 or any(len(set(counts)) > 1 for counts in spreads):
        return f"nodes of {node_ranks} ranks do not divide the expert groups of {size} evenly"
    (counts,) = spreads
    if counts[0] == 1:
        return f"each node has one rank of an expert group of {size}"
    return NodeGrid(len(counts), counts[0])


def _counts(nodes: Sequence[int]) -> list[int]:
    return [nodes.count(node) for node in sorted(set(nodes))]
