"""Joins the ranks that ``torchrun`` started, and leaves them in order.

::

    with launch(config) as mesh:
        ...  # mesh.world, mesh.expert, mesh.replica, mesh.device

A single process imports no distributed backend and starts no thread. Leaving the context without an error is
a collective: no rank goes before all have come; leaving it with one tells the others the reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError, PeerError
from tierstore.parallel.collectives import Failure, LimitedLink
from tierstore.parallel.config import ParallelConfig
from tierstore.parallel.mesh import Mesh, build_mesh, expert_ranks
from tierstore.parallel.place import Place
from tierstore.parallel.watch import DeathWatch

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["launch", "rank_device"]


def rank_device(asked: str, place: Place) -> torch.device:
    """The device of this rank: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``. Raises ConfigError.

    With CUDA, rank ``local_rank`` of a machine has GPU ``local_rank``.
    """
    import torch

    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    _, _, index = asked.partition(":")
    if index and place.world > 1:
        raise ConfigError(
            f"device: {asked} is one GPU for {place.world} ranks; expected auto, cpu or cuda, "
            "and rank LOCAL_RANK of a machine then takes GPU LOCAL_RANK"
        )
    count = torch.cuda.device_count()
    number = int(index) if index.isdigit() else place.local_rank
    if number >= count:
        what = f"LOCAL_RANK: {number} needs GPU {number}" if place.world > 1 else f"device: no GPU {number}"
        raise ConfigError(f"{what}; this machine has {count}")
    return torch.device("cuda", number)


@contextlib.contextmanager
def launch(
    config: ParallelConfig,
    *,
    device: str = "auto",
    link: LimitedLink | None = None,
) -> Iterator[Mesh]:
    """The mesh of this process. ``link`` limits what this rank's collectives send.

    Raises ConfigError for an environment or a layout that cannot work, PeerError when the ranks cannot meet.
    """
    place = Place.from_environment()
    expert_ranks(config, place.world)
    chosen = rank_device(device, place)
    if place.world == 1:
        yield Mesh.alone(place, chosen)
        return
    import torch.distributed as dist

    watch: DeathWatch | None = None
    communicators: list[ProcessGroup] = []

    def blame() -> Failure | None:
        return None if watch is None else watch.blame()

    def abort() -> None:
        for group in communicators:
            with contextlib.suppress(RuntimeError):
                group.abort()

    try:
        _join(config, place, chosen)
        mesh, communicators = build_mesh(config, place, chosen, link=link, blame=blame)
        watch = DeathWatch(
            place, mesh.world, grace_s=config.grace_s, timeout_s=config.timeout_s, on_failure=abort
        )
        yield mesh
        mesh.world.barrier()
    except BaseException as error:
        if watch is not None:
            watch.leave(error)
        abort()
        raise
    else:
        watch.leave()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _join(config: ParallelConfig, place: Place, device: torch.device) -> None:
    import torch
    import torch.distributed as dist

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=config.timeout_s),
            device_id=device if cuda else None,
        )
    except RuntimeError as error:
        where = f"{place.address[0]}:{place.address[1]}"
        reason = str(error).split("\n", 1)[0]
        raise PeerError(
            "joining", f"rank {place.rank} of {place.world} met no one at {where}: {reason}"
        ) from error
