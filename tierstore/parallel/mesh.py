"""The world as (replica x expert): which ranks share the experts, and who owns which.

Rank = replica * E + place in the expert group, for expert groups of E ranks: so a global batch that is cut into
contiguous pieces by rank is also cut contiguously by expert group, and within each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError
from tierstore.parallel.collectives import Channel, Failure, Group, LimitedLink
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.place import Place

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["ExpertBlocks", "Mesh"]


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """``experts`` in contiguous blocks over ``ranks`` of an expert group, the first ones larger by one."""

    experts: int
    ranks: int

    def start(self, rank: int) -> int:
        """The first expert of ``rank``; the number of experts for ``ranks``."""
        share, more = divmod(self.experts, self.ranks)
        return rank * share + min(rank, more)

    def owned(self, rank: int) -> range:
        """The experts of ``rank``; none where there are fewer experts than ranks."""
        return range(self.start(rank), self.start(rank + 1))

    def owner(self, expert: int) -> int:
        """The rank of the expert group that holds ``expert``. Raises ValueError if there is none such."""
        if not 0 <= expert < self.experts:
            raise ValueError(f"expected an expert of 0 to {self.experts - 1}, got {expert}")
        share, more = divmod(self.experts, self.ranks)
        large = more * (share + 1)
        return expert // (share + 1) if expert < large else more + (expert - large) // share


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process among the others.

    ``world``: all ranks. ``expert``: the ranks that share one copy of the experts with this one.
    ``replica``: the ranks that hold the same experts as this one, in the other copies. Groups with the same
    ranks are the same object.
    """

    place: Place
    device: torch.device
    world: Group
    expert: Group
    replica: Group

    @classmethod
    def alone(cls, place: Place, device: torch.device) -> Mesh:
        """One process, without any process group."""
        group = Group.alone()
        return cls(place, device, group, group, group)

    @property
    def replicas(self) -> int:
        """How many copies of the experts there are."""
        return self.replica.size

    def blocks(self, experts: int) -> ExpertBlocks:
        """How ``experts`` are spread over an expert group."""
        return ExpertBlocks(experts, self.expert.size)


def expert_ranks(config: ParallelConfig, world: int) -> int:
    """The ranks of an expert group. Raises ConfigError unless they divide ``world``."""
    size = config.expert or world
    if world % size:
        raise ConfigError(f"parallel.expert: expected a divisor of the {world} ranks, got {size}")
    return size


def build_mesh(
    config: ParallelConfig,
    place: Place,
    device: torch.device,
    *,
    link: LimitedLink | None,
    blame: Callable[[], Failure | None],
) -> tuple[Mesh, list[ProcessGroup]]:
    """The mesh and its communicators. A collective, behind ``init_process_group``. Raises ConfigError.

    Communicators: 2 for the world; with more than one replica and more than one rank in an expert group, 2
    more for each of the two. On Gloo each costs three threads that mostly sleep.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    expert = expert_ranks(config, place.world)
    mesh = init_device_mesh(
        device.type, (place.world // expert, expert), mesh_dim_names=("replica", "expert")
    )
    made: list[ProcessGroup] = []

    def group(name: str) -> Group:
        stream = dist.group.WORLD if name == "world" else mesh.get_group(name)
        assert stream is not None  # only a rank outside of a group has none
        # Every rank takes part in making every group of a dimension, in the same order.
        rows = [list(range(place.world))]
        if name != "world":
            dimension = mesh.mesh if name == "expert" else mesh.mesh.t()
            rows = dimension.tolist()
        mine = next(row for row in rows if place.rank in row)
        exchange, _ = dist.new_subgroups_by_enumeration(rows)  # type: ignore[no-untyped-call]
        made.extend((stream, exchange))
        communicators = {Channel.STREAM: stream, Channel.EXCHANGE: exchange}
        native = device.type == "cuda"
        rank = mine.index(place.rank)
        return Group(rank, mine, communicators, native_gather=native, link=link, blame=blame)

    world = group("world")
    if expert == place.world:
        return Mesh(place, device, world, world, Group.alone(place.rank)), made
    if expert == 1:
        return Mesh(place, device, world, Group.alone(place.rank), world), made
    return Mesh(place, device, world, group("expert"), group("replica")), made
