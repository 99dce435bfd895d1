"""How ranks are laid out, in numbers: stages of copies of the experts, each over a group of ranks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.parallel.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Layout:
    """How many ranks there are of each kind: ``stages`` stages of ``replicas`` copies of the experts, each over ``expert``
    ranks, which are tensor-parallel or (``tensor`` = 1) have pieces of the batch of their own.
    """

    stages: int
    replicas: int
    expert: int
    tensor: int

    def __str__(self) -> str:
        if self.world == 1:
            return "one rank"
        kind = (
            f"tensor-parallel groups of {self.tensor}"
            if self.tensor > 1
            else f"expert groups of {self.expert}"
        )
        stages = f"{self.stages} stages, " if self.stages > 1 else ""
        return f"{self.world} ranks ({stages}{kind})"

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stages * self.replicas * self.expert

    @property
    def data(self) -> int:
        """The ranks of a stage that compute other pieces of the global batch."""
        return self.replicas if self.tensor > 1 else self.replicas * self.expert

    def rows(self, dimension: str) -> list[list[int]]:
        """The groups of ``dimension`` (a field of ``Mesh``), each its ranks, ascending."""
        replicas, experts = range(self.replicas), range(self.expert)
        stages = [
            [
                [(stage * self.replicas + replica) * self.expert + place for place in experts]
                for replica in replicas
            ]
            for stage in range(self.stages)
        ]
        whole = [[rank for group in stage for rank in group] for stage in stages]
        if dimension == "world":
            return [[rank for stage in whole for rank in stage]]
        if dimension == "pipeline":
            return [list(ranks) for ranks in zip(*whole, strict=True)]
        if dimension == "expert" or (dimension == "tensor" and self.tensor > 1):
            return [group for stage in stages for group in stage]
        if dimension == "replica" or (dimension == "data" and self.tensor > 1):
            return [list(ranks) for stage in stages for ranks in zip(*stage, strict=True)]
        if dimension == "data":
            return whole
        return [[rank] for stage in whole for rank in stage]  # tensor parallelism of one rank


def layout_of(config: ParallelConfig, world: int) -> Layout:
    """The layout of ``world`` ranks. Raises ConfigError naming the setting unless they can be laid out so."""
    each, more = divmod(world, config.stages)
    if more:
        raise ConfigError(f"parallel.stages: expected a divisor of the {world} ranks, got {config.stages}")
    if each % config.tensor:
        raise ConfigError(
            f"parallel.tensor: expected a divisor of the {each} ranks of a stage, got {config.tensor}"
        )
    if config.tensor > 1 and config.expert not in (0, config.tensor):
        raise ConfigError(
            f"parallel.expert: expected 0 or {config.tensor}: with parallel.tensor the experts are divided over the "
            f"tensor-parallel group, got {config.expert}"
        )
    expert = config.tensor if config.tensor > 1 else config.expert or each
    if each % expert:
        where = f"the {each} ranks" + (" of a stage" if config.stages > 1 else "")
        raise ConfigError(f"parallel.expert: expected a divisor of {where}, got {expert}")
    return Layout(config.stages, each // expert, expert, config.tensor)
