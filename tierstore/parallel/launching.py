"""Joins the ranks that ``torchrun`` started, and ends them in order.

::

    with launch(config) as mesh:
        ...  # mesh.world, mesh.expert, mesh.replica, mesh.device

A single process imports no distributed backend, and starts no thread unless ``torchrun`` must be watched.
Leaving the context without an error is a collective: no rank leaves before all have come; leaving it with an error
tells the others the reason.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from tierstore.accelerator import (
    accelerator_type,
    backends,
    device_count,
    has_own_memory,
    identity,
    make_current,
)
from tierstore.decision import Decision
from tierstore.errors import CapabilityError, ConfigError, PeerError
from tierstore.machine_profile import fit_cost
from tierstore.parallel.collectives import Failure, RankGroup, uncounted
from tierstore.parallel.config import ExchangeMode, ParallelConfig
from tierstore.parallel.hierarchical import (
    Exchange,
    ExchangeModel,
    FlatExchange,
    HierarchicalExchange,
    SizedExchange,
)
from tierstore.parallel.job_store import meeting_store, open_job_store
from tierstore.parallel.layout import NodeGrid, RankEnvironment, layout_of, node_grid, ranks_of_a_node
from tierstore.parallel.mesh import GroupMaker, Mesh, build_mesh
from tierstore.parallel.watch import DeathWatch
from tierstore.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store


def rank_device(asked: str, environment: RankEnvironment) -> torch.device:
    """The device of this rank: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto`` is CUDA if available.

    With CUDA, rank ``local_rank`` of a machine has GPU ``local_rank``. Raises ConfigError, and CapabilityError if CUDA
    is requested on a machine without it.
    """
    import torch

    kind, _, index = asked.partition(":")
    found = accelerator_type()
    numbered = ("cuda", found)
    if kind not in ("auto", "cpu", *numbered) or (index and not (kind in numbered and index.isdigit())):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {asked!r}")
    if kind == "cpu" or (kind == "auto" and found is None):
        return torch.device("cpu")
    if found is None or kind not in ("auto", found):
        raise CapabilityError(
            f"device: {asked} was requested, but torch {torch.__version__} finds no CUDA device"
        )
    if index and environment.world > 1:
        raise ConfigError(
            f"device: {asked} is one GPU for {environment.world} ranks; expected auto, cpu or cuda, "
            "and rank LOCAL_RANK of a machine then takes GPU LOCAL_RANK"
        )
    count = device_count()
    number = int(index) if index else environment.local_rank
    if not index and count == 1 and environment.world > 1:
        number = 0  # some launchers show each rank only its own GPU; ranks that share one are refused when they join
    if number >= count:
        what = (
            f"LOCAL_RANK: {number} needs GPU {number}"
            if environment.world > 1
            else f"device: no GPU {number}"
        )
        raise ConfigError(f"{what}; this machine has {count}")
    return torch.device(found, number)


@contextlib.contextmanager
def launch(
    config: ParallelConfig, *, device: str = "auto", make_group: Callable[..., RankGroup] = RankGroup
) -> Iterator[Mesh]:
    """The mesh of this process. ``make_group`` makes its groups of more than one rank: ``RankGroup``, or a callable with
    the same arguments.

    Raises ConfigError for an environment or a layout that cannot work, PeerError when the ranks cannot meet.
    """
    environment = RankEnvironment.from_environment()
    layout_of(config, environment.world)
    check_exchange(config, environment)
    chosen = rank_device(device, environment)
    make_current(chosen)
    if environment.world == 1:
        with _watched_alone(config, environment):
            yield Mesh.alone(environment, chosen, open_job_store(environment, config.timeout_s))
        return
    import torch.distributed as dist

    mesh: Mesh | None = None
    watch: DeathWatch | None = None

    def blame(within_s: float) -> Failure | None:
        return None if watch is None else watch.blame(within_s)

    maker = GroupMaker(make=make_group, blame=blame, timeout_s=config.timeout_s)

    def abort() -> None:
        for group in maker.communicators:
            with contextlib.suppress(RuntimeError):
                group.abort()

    try:
        _join(config, environment, chosen)
        mesh = build_mesh(config, environment, chosen, maker)
        mesh = replace(mesh, job_store=open_job_store(environment, config.timeout_s))
        watch = DeathWatch(
            environment, mesh.world, grace_s=config.grace_s, timeout_s=config.timeout_s, on_failure=abort
        )
        mesh = with_exchange(config, mesh, maker)
        yield mesh
        mesh.world.barrier()
    except BaseException as error:
        if watch is None:
            abort()
        else:
            watch.leave(error)
        raise
    else:
        watch.leave()
    finally:
        # The last references, so that the backend's threads are joined here: a thread that still frees a tensor while the
        # interpreter ends would abort the process.
        if mesh is not None:
            mesh.close()
        maker.communicators.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _watched_alone(config: ParallelConfig, environment: RankEnvironment) -> Iterator[None]:
    """A single rank has no peers, but must still end with its ``torchrun``."""
    if not environment.supervised:
        yield
        return
    watch = DeathWatch(
        environment,
        RankGroup.alone(),
        grace_s=config.grace_s,
        timeout_s=config.timeout_s,
        on_failure=lambda: None,
    )
    try:
        yield
    finally:
        watch.leave()


def _join(config: ParallelConfig, environment: RankEnvironment, device: torch.device) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    # Pipeline stages import it. Its functions take the world as their default group if there is one when they are defined,
    # and then keep it, so that its threads never end.
    import_module("torch.distributed.nn.functional")
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store = meeting_store(environment, config.timeout_s)
        check_devices(PrefixStore("devices", store), environment, device)
        dist.init_process_group(
            backends(device),
            store=PrefixStore("tierstore", store),
            rank=environment.rank,
            world_size=environment.world,
            timeout=timeout,
            device_id=device if has_own_memory(device) else None,
        )
    except RuntimeError as error:
        where = f"{environment.address[0]}:{environment.address[1]}"
        reason = str(error).split("\n", 1)[0]
        raise PeerError(
            "joining",
            f"rank {environment.rank} of {environment.world} could not join the others at {where}: {reason}",
        ) from error


def check_devices(store: Store, environment: RankEnvironment, device: torch.device) -> None:
    """Raise ConfigError if two ranks have the same GPU, which NCCL refuses. A collective on GPUs."""
    if not has_own_memory(device):
        return
    own = identity(device)
    store.set(str(environment.rank), own)
    for rank in range(environment.world):
        if rank != environment.rank and store.get(str(rank)).decode() == own:
            first, second = sorted((rank, environment.rank))
            raise ConfigError(f"device: ranks {first} and {second} share a GPU, but each rank needs its own")


# AUTO for the exchange of rows ------------------------------------------------------------------------------
#
# Decided once, when the ranks have joined. AUTO measures exchanges of some sizes, flat and in two steps, each a few
# times; the fastest counts, since disturbances only slow one down. Times are those of the slowest rank, so every rank
# fits the same model and decides alike. The decision changes when rows arrive, but no bit.


#: Bytes of the messages that AUTO measures, and the number of repetitions.
PROBE_BYTES = (1 << 10, 8 << 10, 64 << 10, 256 << 10)
PROBE_ROUNDS = 5


def expert_grid(config: ParallelConfig, environment: RankEnvironment) -> NodeGrid | str:
    """How expert groups are spread over nodes; the reason if rows cannot be exchanged in two steps."""
    if config.tensor > 1:
        return "parallel.tensor does not support an exchange in two steps"
    groups = layout_of(config, environment.world).rows("expert")
    node_ranks = ranks_of_a_node(config, environment)
    found = node_grid(groups, node_ranks)
    if isinstance(found, str) and not (config.node_ranks or environment.local_world):
        found += " (neither parallel.node_ranks nor LOCAL_WORLD_SIZE says where nodes end)"
    return found


def check_exchange(config: ParallelConfig, environment: RankEnvironment) -> None:
    """Raise ConfigError if HIERARCHICAL is configured but impossible."""
    grid = expert_grid(config, environment)
    if config.exchange is ExchangeMode.HIERARCHICAL and isinstance(grid, str):
        raise ConfigError(f"parallel.exchange: hierarchical is impossible: {grid}")


def with_exchange(config: ParallelConfig, mesh: Mesh, maker: GroupMaker) -> Mesh:
    """``mesh`` with the exchange of ``config``. A collective. Raises ConfigError, PeerError."""
    exchange, choice = _chosen(config, mesh, maker)
    return replace(mesh, exchange=exchange, exchange_choice=choice)


def _chosen(config: ParallelConfig, mesh: Mesh, maker: GroupMaker) -> tuple[Exchange, Decision[str]]:
    flat, mode = FlatExchange(mesh.expert), config.exchange
    grid = expert_grid(config, mesh.environment)
    if mode is ExchangeMode.AUTO and not isinstance(grid, str) and has_own_memory(mesh.device):
        grid = "NCCL exchanges in two steps by itself (PXN)"
    said = mesh.world.all_gather_object((mode, grid))
    for rank, (other, _) in enumerate(said):
        if other is not said[0][0]:
            raise ConfigError(f"parallel.exchange: rank {rank} has {other}, but rank 0 has {said[0][0]}")
    # torchrun may have started other numbers of ranks on other nodes.
    if any(other != said[0][1] for _, other in said):
        grid = "nodes have different numbers of ranks"
    if mode is ExchangeMode.FLAT:
        return flat, exchange_decision(mode, 0.0, "as configured")
    if isinstance(grid, str):
        if mode is ExchangeMode.HIERARCHICAL:
            raise ConfigError(f"parallel.exchange: hierarchical is impossible: {grid}")
        return flat, exchange_decision(mode, 0.0, grid)
    hierarchical = _hierarchical(config, mesh, grid, maker)
    if mode is ExchangeMode.HIERARCHICAL:
        return hierarchical, exchange_decision(mode, math.inf, "as configured")
    model = measured_model(mesh, grid, hierarchical)
    choice = exchange_decision(mode, model.below_bytes, model.describe())
    if model.below_bytes:
        return SizedExchange(flat, hierarchical, model.below_bytes), choice
    for group in hierarchical.groups:
        maker.drop(group)
    return flat, choice


def exchange_decision(mode: ExchangeMode, below_bytes: float, reason: str) -> Decision[str]:
    """What ``parallel.exchange = mode`` resolved to: hierarchical below ``below_bytes`` per message (0: never)."""
    if below_bytes <= 0:
        value = "flat"
    elif below_bytes == math.inf:
        value = "hierarchical"
    else:
        value = f"hierarchical for messages below {format_bytes(round(below_bytes))}, flat above"
    return Decision("exchange", f"{mode.value}, {value}", reason)


def _hierarchical(
    config: ParallelConfig, mesh: Mesh, grid: NodeGrid, maker: GroupMaker
) -> HierarchicalExchange:
    environment = mesh.environment
    experts = layout_of(config, environment.world).rows("expert")
    node_ranks = ranks_of_a_node(config, environment)
    neighbours = [row for group in experts for row in grid.neighbours(group)]
    rails = [row for group in experts for row in grid.rails(group)]
    return HierarchicalExchange(
        *(maker.exchange_group(environment.rank, rows, node_ranks) for rows in (neighbours, rails))
    )


def measured_model(
    mesh: Mesh,
    grid: NodeGrid,
    hierarchical: HierarchicalExchange,
    sizes: tuple[int, ...] = PROBE_BYTES,
    rounds: int = PROBE_ROUNDS,
) -> ExchangeModel:
    """Measure what exchanges cost between these ranks, with messages of ``sizes`` bytes, which are not counted as
    traffic. A collective. Raises PeerError.
    """
    flat, (_, rail) = FlatExchange(mesh.expert), hierarchical.groups
    ways: list[tuple[Exchange, int]] = [(flat, 1), (FlatExchange(rail), grid.each), (hierarchical, 1)]
    seconds = torch.empty(len(ways), len(sizes), dtype=torch.float64)
    with uncounted(mesh.world, mesh.expert, *hierarchical.groups):
        for number, nbytes in enumerate(sizes):
            for way, (exchange, messages) in enumerate(ways):
                ranks = exchange.groups[0].size if exchange is not hierarchical else grid.ranks
                seconds[way, number] = _least_s(mesh, exchange, ranks, nbytes * messages, rounds)
        mesh.world.max(seconds)
    return ExchangeModel(grid, *(fit_cost(sizes, times) for times in seconds.tolist()))


def _least_s(mesh: Mesh, exchange: Exchange, ranks: int, nbytes: int, rounds: int) -> float:
    """The least seconds of an exchange in which each of ``ranks`` ranks sends each a message of ``nbytes``."""
    given = torch.zeros((ranks, nbytes), dtype=torch.uint8)
    received = torch.empty_like(given)
    once_SS = torch.ones((ranks, ranks), dtype=torch.int64)
    seconds = []
    for _ in range(rounds):
        mesh.world.barrier()
        begun = time.perf_counter()
        exchange.all_to_all(received, given, once_SS).wait()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
