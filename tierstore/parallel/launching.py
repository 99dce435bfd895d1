"""Joins the ranks that ``torchrun`` started, and leaves them in order.

::

    with launch(config) as mesh:
        ...  # mesh.world, mesh.expert, mesh.replica, mesh.device

A single process imports no distributed backend, and starts no thread unless ``torchrun`` has to be watched.
Leaving the context without an error is a collective: no rank goes before all have come; leaving it with one tells
the others the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from tierstore.errors import CapabilityError, ConfigError, PeerError
from tierstore.parallel.choosing import GroupMaker, check_exchange, with_exchange
from tierstore.parallel.collectives import Failure, RankGroup
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.environment import RankEnvironment
from tierstore.parallel.job_store import open_job_store
from tierstore.parallel.layout import layout_of
from tierstore.parallel.meeting import meeting_store
from tierstore.parallel.mesh import Mesh, build_mesh
from tierstore.parallel.watch import DeathWatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


def rank_device(asked: str, environment: RankEnvironment) -> torch.device:
    """The device of this rank: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto`` is CUDA where there is one.

    With CUDA, rank ``local_rank`` of a machine has GPU ``local_rank``. Raises ConfigError, and CapabilityError for
    CUDA on a machine without.
    """
    import torch

    kind, _, index = asked.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {asked!r}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    if not count:
        raise CapabilityError(
            f"device: {asked} was asked for, and torch {torch.__version__} finds no CUDA device"
        )
    if index and environment.world > 1:
        raise ConfigError(
            f"device: {asked} is one GPU for {environment.world} ranks; expected auto, cpu or cuda, "
            "and rank LOCAL_RANK of a machine then takes GPU LOCAL_RANK"
        )
    number = int(index) if index else environment.local_rank
    if number >= count:
        what = (
            f"LOCAL_RANK: {number} needs GPU {number}"
            if environment.world > 1
            else f"device: no GPU {number}"
        )
        raise ConfigError(f"{what}; this machine has {count}")
    return torch.device("cuda", number)


@contextlib.contextmanager
def launch(
    config: ParallelConfig, *, device: str = "auto", make_group: Callable[..., RankGroup] = RankGroup
) -> Iterator[Mesh]:
    """The mesh of this process. ``make_group`` makes its groups of more than one rank: ``RankGroup``, or what takes the
    same arguments.

    Raises ConfigError for an environment or a layout that cannot work, PeerError when the ranks cannot meet.
    """
    environment = RankEnvironment.from_environment()
    layout_of(config, environment.world)
    check_exchange(config, environment)
    chosen = rank_device(device, environment)
    if environment.world == 1:
        with _watched_alone(config, environment):
            yield Mesh.alone(environment, chosen, open_job_store(environment, config.timeout_s))
        return
    mesh: Mesh | None = None
    watch: DeathWatch | None = None
    communicators: list[ProcessGroup] = []

    def blame() -> Failure | None:
        return None if watch is None else watch.blame()

    def abort() -> None:
        for group in communicators:
            with contextlib.suppress(RuntimeError):
                group.abort()

    try:
        _join(config, environment, chosen)
        mesh, communicators = build_mesh(config, environment, chosen, make_group=make_group, blame=blame)
        mesh = replace(mesh, job_store=open_job_store(environment, config.timeout_s))
        watch = DeathWatch(
            environment, mesh.world, grace_s=config.grace_s, timeout_s=config.timeout_s, on_failure=abort
        )
        maker = GroupMaker(
            make=make_group, blame=blame, communicators=communicators, timeout_s=config.timeout_s
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
        _part(mesh, communicators)


@contextlib.contextmanager
def _watched_alone(config: ParallelConfig, environment: RankEnvironment) -> Iterator[None]:
    """One rank has no peers, and ends with its ``torchrun`` all the same."""
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


def _part(mesh: Mesh | None, communicators: list[ProcessGroup]) -> None:
    """Drops the last references, so that the backend's threads are joined here: one that still frees a tensor
    while the interpreter ends would abort the process.
    """
    import torch.distributed as dist

    if mesh is not None:
        mesh.close()
    communicators.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(config: ParallelConfig, environment: RankEnvironment, device: torch.device) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    try:
        store = meeting_store(environment, config.timeout_s)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=PrefixStore("tierstore", store),
            rank=environment.rank,
            world_size=environment.world,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except RuntimeError as error:
        where = f"{environment.address[0]}:{environment.address[1]}"
        reason = str(error).split("\n", 1)[0]
        raise PeerError(
            "joining", f"rank {environment.rank} of {environment.world} met no one at {where}: {reason}"
        ) from error
