"""The world as (stage x replica x expert): which ranks compute which layers, share the experts, and own each of them.

Rank = (stage * R + replica) * E + rank in the expert group, for R replicas of the experts, in groups of E ranks. Without
tensor parallelism each rank of a stage has its own piece of the global batch, so a batch that is cut into contiguous
pieces by rank is also cut contiguously by expert group, and within each. With tensor parallelism the expert group is the
tensor-parallel group, whose ranks compute the same tokens, and the batch is cut by replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from tierstore.accelerator import has_own_memory
from tierstore.decision import Decision
from tierstore.parallel.collectives import Channel, Collective, CollectiveTraffic, Failure, RankGroup
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.hierarchical import Exchange, FlatExchange
from tierstore.parallel.job_store import JobStore, MemoryJobStore
from tierstore.parallel.layout import Layout, RankEnvironment, layout_of, ranks_of_a_node

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """``experts`` in contiguous blocks over ``ranks`` of an expert group. The first blocks may be larger by one."""

    experts: int
    ranks: int

    def start(self, rank: int) -> int:
        """The first expert of ``rank``; for ``ranks`` itself, the number of experts."""
        share, more = divmod(self.experts, self.ranks)
        return rank * share + min(rank, more)

    def owned(self, rank: int) -> range:
        """The experts of ``rank``; may be none if there are fewer experts than ranks."""
        return range(self.start(rank), self.start(rank + 1))

    def owner(self, expert: int) -> int:
        """The rank of the expert group that holds ``expert``. Raises ValueError if it is out of range."""
        if not 0 <= expert < self.experts:
            raise ValueError(f"expected an expert of 0 to {self.experts - 1}, got {expert}")
        share, more = divmod(self.experts, self.ranks)
        large = more * (share + 1)
        return expert // (share + 1) if expert < large else more + (expert - large) // share


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This process among the others. Groups with the same ranks are the same object.

    ``world``: all ranks, which agree, check and commit together. ``data``: the ranks of this stage that compute different
    pieces of the global batch with the same part of the dense parameters, which ZeRO-3 shards over them.
    ``expert``: the ranks that share one copy of the experts with this one. ``replica``: the ranks that hold the same
    experts as this one, in the other copies. ``tensor``: the ranks that compute the same tokens with other parts of the
    dense parameters. ``pipeline``: the ranks of all stages that this rank's tokens pass, by stage.
    ``exchange``: how rows travel between the ranks of ``expert``.
    ``job_store``: what earlier attempts of this job have set.
    """

    environment: RankEnvironment
    device: torch.device
    world: RankGroup
    data: RankGroup
    expert: RankGroup
    replica: RankGroup
    tensor: RankGroup
    pipeline: RankGroup
    exchange: Exchange
    #: The reason for ``exchange``; None if nothing had to be chosen.
    exchange_choice: Decision[str] | None = None
    job_store: JobStore = field(default_factory=MemoryJobStore)

    @classmethod
    def alone(
        cls, environment: RankEnvironment, device: torch.device, job_store: JobStore | None = None
    ) -> Mesh:
        """One process, without any process group."""
        group = RankGroup.alone()
        return cls(
            environment=environment,
            device=device,
            world=group,
            data=group,
            expert=group,
            replica=group,
            tensor=group,
            pipeline=group,
            exchange=FlatExchange(group),
            job_store=job_store or MemoryJobStore(),
        )

    @property
    def stages(self) -> int:
        """The number of pipeline stages; this one is number ``pipeline.rank``."""
        return self.pipeline.size

    @property
    def expert_sources(self) -> range:
        """The ranks of ``data`` (numbers there) whose rows go to the experts of this rank's expert group."""
        if self.tensor.size > 1:
            return range(self.data.rank, self.data.rank + 1)
        first = self.replica.rank * self.expert.size
        return range(first, first + self.expert.size)

    @property
    def replicas(self) -> int:
        """The number of copies of the experts."""
        return self.replica.size

    @property
    def layout(self) -> Layout:
        """The number of ranks of each kind."""
        return Layout(self.stages, self.replicas, self.expert.size, self.tensor.size)

    def device_mesh(self) -> DeviceMesh:
        """The dimensions with more than one rank, for torch's own parallel modules (``fully_shard``).

        It keeps the groups alive: drop it before leaving. Raises ValueError in a single process.
        """
        from torch.distributed.device_mesh import DeviceMesh

        dimensions = {"pipeline": self.pipeline, "replica": self.replica, "expert": self.expert}
        named = {name: group for name, group in dimensions.items() if group.size > 1}
        if not named:
            raise ValueError("a single process has no device mesh")
        ranks = torch.arange(self.world.size).view([group.size for group in named.values()])
        groups = [group.communicator(Channel.STREAM) for group in named.values()]
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=tuple(named))

    def close(self) -> None:
        """Drop the communicators; no collective is possible afterwards."""
        for group in self._groups():
            group.close()

    def traffic(self) -> dict[Collective, CollectiveTraffic]:
        """What this rank has sent to others so far, over all groups."""
        total = {operation: CollectiveTraffic() for operation in Collective}
        for group in self._groups():
            for operation, sent in group.traffic.items():
                total[operation].add(sent)
        return total

    def blocks(self, experts: int) -> ExpertBlocks:
        """How ``experts`` are spread over an expert group."""
        return ExpertBlocks(experts, self.expert.size)

    def _groups(self) -> list[RankGroup]:
        """Each group once."""
        named = (
            self.world,
            self.data,
            self.expert,
            self.replica,
            self.tensor,
            self.pipeline,
            *self.exchange.groups,
        )
        return list({id(group): group for group in named}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMaker:
    """How the groups of a run are made: by ``make``, which is called like ``RankGroup``. ``communicators``: all that exist,
    to be aborted after a failure.
    """

    make: Callable[..., RankGroup]
    blame: Callable[[float], Failure | None]
    timeout_s: float
    communicators: list[ProcessGroup] = field(default_factory=list)

    def communicator(self, rows: list[list[int]]) -> ProcessGroup:
        """The communicator of this rank's group among ``rows``, which hold every rank once. A collective of all ranks, which
        make all groups in the same order.
        """
        import torch.distributed as dist

        timeout = timedelta(seconds=self.timeout_s)  # groups do not inherit the world's
        made: ProcessGroup
        made, _ = dist.new_subgroups_by_enumeration(rows, timeout=timeout)  # type: ignore[no-untyped-call]
        self.communicators.append(made)
        return made

    def group(
        self,
        rank: int,
        rows: list[list[int]],
        channels: dict[Channel, ProcessGroup],
        *,
        node_ranks: int,
        native_gather: bool = False,
    ) -> RankGroup:
        """The group of global rank ``rank`` among ``rows``, over ``channels``."""
        ranks = next(row for row in rows if rank in row)
        return self.make(
            ranks.index(rank),
            ranks,
            channels,
            native_gather=native_gather,
            node_ranks=node_ranks,
            blame=self.blame,
        )

    def exchange_group(self, rank: int, rows: list[list[int]], node_ranks: int) -> RankGroup:
        """The same with a communicator of its own, for exchanges alone. A collective of all ranks."""
        return self.group(rank, rows, {Channel.EXCHANGE: self.communicator(rows)}, node_ranks=node_ranks)

    def drop(self, group: RankGroup) -> None:
        """Destroys a group that ``exchange_group`` made, on all of its ranks."""
        import torch.distributed as dist

        made = group.communicator(Channel.EXCHANGE)
        group.close()
        self.communicators.remove(made)
        dist.destroy_process_group(made)


def build_mesh(
    config: ParallelConfig, environment: RankEnvironment, device: torch.device, maker: GroupMaker
) -> Mesh:
    """The mesh, with groups made by ``maker``. A collective, to be called after ``init_process_group``. Raises ConfigError.

    Communicators: 2 for the world, and 2 for each further set of groups that is neither the world nor one rank. On Gloo each
    costs three threads that mostly sleep: one wakes 100 times a second to poll its sockets.
    """
    import torch.distributed as dist

    everyone = dist.group.WORLD
    assert everyone is not None  # only after init_process_group
    maker.communicators.append(everyone)
    layout, native = layout_of(config, environment.world), has_own_memory(device)
    node_ranks, alone = ranks_of_a_node(config, environment), RankGroup.alone(environment.rank)
    made: list[tuple[list[list[int]], RankGroup]] = []

    def along(dimension: str) -> RankGroup:
        """This rank's group along ``dimension``; dimensions with the same ranks share one group."""
        rows = layout.rows(dimension)
        if len(rows[0]) == 1:
            return alone
        for other, existing in made:
            if other == rows:
                return existing
        stream = everyone if dimension == "world" else maker.communicator(rows)
        channels = {Channel.STREAM: stream, Channel.EXCHANGE: maker.communicator(rows)}
        group = maker.group(environment.rank, rows, channels, node_ranks=node_ranks, native_gather=native)
        made.append((rows, group))
        return group

    # First, so that all dimensions with the world's ranks use the world's own communicator.
    world = along("world")
    expert = along("expert")
    return Mesh(
        environment=environment,
        device=device,
        world=world,
        data=along("data"),
        expert=expert,
        replica=along("replica"),
        tensor=along("tensor"),
        pipeline=along("pipeline"),
        exchange=FlatExchange(expert),
    )
