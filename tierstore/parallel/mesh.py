"""The world as (replica x expert): which ranks share the experts, and who owns which.

Rank = replica * E + rank in the expert group, for expert groups of E ranks: so a global batch that is cut into
contiguous pieces by rank is also cut contiguously by expert group, and within each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from tierstore.errors import ConfigError
from tierstore.parallel.collectives import Channel, Collective, CollectiveTraffic, Failure, RankGroup
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.environment import RankEnvironment
from tierstore.parallel.job_store import JobStore, MemoryJobStore

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


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
    ranks are the same object. ``job_store``: what earlier attempts of this job have set.
    """

    environment: RankEnvironment
    device: torch.device
    world: RankGroup
    expert: RankGroup
    replica: RankGroup
    job_store: JobStore = field(default_factory=MemoryJobStore)

    @classmethod
    def alone(
        cls, environment: RankEnvironment, device: torch.device, job_store: JobStore | None = None
    ) -> Mesh:
        """One process, without any process group."""
        group = RankGroup.alone()
        return cls(environment, device, group, group, group, job_store or MemoryJobStore())

    @property
    def replicas(self) -> int:
        """How many copies of the experts there are."""
        return self.replica.size

    def device_mesh(self) -> DeviceMesh:
        """The same dimensions, those of more than one rank, for torch's own parallel modules (``fully_shard``).

        It keeps the groups alive: drop it before leaving. Raises ValueError for a single process.
        """
        from torch.distributed.device_mesh import DeviceMesh

        dimensions = {"replica": self.replica, "expert": self.expert}
        named = {name: group for name, group in dimensions.items() if group.size > 1}
        if not named:
            raise ValueError("a single process has no device mesh")
        ranks = torch.arange(self.world.size).view([group.size for group in named.values()])
        groups = [group.communicator(Channel.STREAM) for group in named.values()]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(named))

    def close(self) -> None:
        """Drops the communicators; no collective is possible any more."""
        for group in (self.world, self.expert, self.replica):
            group.close()

    def traffic(self) -> dict[Collective, CollectiveTraffic]:
        """What this rank has sent to others so far, over all groups."""
        total = {operation: CollectiveTraffic() for operation in Collective}
        for group in {id(group): group for group in (self.world, self.expert, self.replica)}.values():
            for operation, sent in group.traffic.items():
                total[operation].calls += sent.calls
                total[operation].sent_bytes += sent.sent_bytes
        return total

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
    environment: RankEnvironment,
    device: torch.device,
    *,
    make_group: Callable[..., RankGroup],
    blame: Callable[[], Failure | None],
) -> tuple[Mesh, list[ProcessGroup]]:
    """The mesh, of groups that ``make_group`` makes, and its communicators. A collective, behind
    ``init_process_group``. Raises ConfigError.

    Communicators: 2 for the world; with more than one replica and more than one rank in an expert group, 2
    more for each of the two. On Gloo each costs three threads that mostly sleep.
    """
    import torch.distributed as dist

    expert = expert_ranks(config, environment.world)
    layout = [list(range(start, start + expert)) for start in range(0, environment.world, expert)]
    made: list[ProcessGroup] = []
    timeout = timedelta(seconds=config.timeout_s)

    def communicator(rows: list[list[int]]) -> ProcessGroup:
        # Every rank takes part in making every group of a dimension, in the same order. Groups do not inherit
        # the world's timeout.
        mine: ProcessGroup
        mine, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)  # type: ignore[no-untyped-call]
        made.append(mine)
        return mine

    def group(rows: list[list[int]], stream: ProcessGroup) -> RankGroup:
        ranks = next(row for row in rows if environment.rank in row)
        communicators = {Channel.STREAM: stream, Channel.EXCHANGE: communicator(rows)}
        native = device.type == "cuda"
        rank = ranks.index(environment.rank)
        return make_group(rank, ranks, communicators, native_gather=native, blame=blame)

    everyone = dist.group.WORLD
    assert everyone is not None  # only behind init_process_group
    made.append(everyone)
    world = group([list(range(environment.world))], everyone)
    alone = RankGroup.alone(environment.rank)
    if expert in (1, environment.world):
        experts, replicas = (world, alone) if expert > 1 else (alone, world)
        return Mesh(environment, device, world, experts, replicas), made
    columns = [list(column) for column in zip(*layout, strict=True)]
    experts = group(layout, communicator(layout))
    replicas = group(columns, communicator(columns))
    return Mesh(environment, device, world, experts, replicas), made
