"""Which rank a process is, from the environment that ``torchrun`` sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
#: Only where nodes end depends on it.
_LOCAL_WORLD = "LOCAL_WORLD_SIZE"
_JOB = "TORCHELASTIC_RUN_ID"
#: What torchrun calls every job that was given no ``--rdzv-id``.
_NO_JOB = "none"
_NEEDED = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Rank ``rank`` of ``world``; ``local_rank`` among the ``local_world`` ranks of its machine (0: it is not said).

    ``address``: the machine of rank 0, and the port where ranks meet. ``supervised``: a ``torchrun`` process
    started this one and must outlive it. ``job``: the ``--rdzv-id`` that it was given, which all attempts of a job share.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 0
    address: tuple[str, int] = ("127.0.0.1", 0)
    supervised: bool = False
    job: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RankEnvironment:
        """What ``environ`` (this process's, when None) says; one process alone if it says nothing of ranks.

        Raises ConfigError naming the variable for an environment that is only half there or cannot be.
        """
        environ = os.environ if environ is None else environ
        # MASTER_* alone says nothing: clusters set it for every process of a job.
        if not any(name in environ for name in _NUMBERS):
            return cls()
        missing = [name for name in _NEEDED if not environ.get(name)]
        if missing:
            given = ", ".join(name for name in _NUMBERS if name in environ)
            raise ConfigError(
                f"{', '.join(missing)}: not set, though {given} is; start ranks with torchrun, "
                "or unset them all for a single process"
            )
        rank, world, local = (_number(environ, name) for name in _NUMBERS)
        if world < 1:
            raise ConfigError(f"WORLD_SIZE: expected at least 1, got {world}")
        if rank >= world:
            raise ConfigError(f"RANK: expected 0 to {world - 1} (WORLD_SIZE is {world}), got {rank}")
        if local > rank:
            raise ConfigError(f"LOCAL_RANK: expected at most {rank} (RANK), got {local}")
        local_world = _number(environ, _LOCAL_WORLD) if environ.get(_LOCAL_WORLD) else 0
        if local_world and not local < local_world <= world:
            raise ConfigError(
                f"{_LOCAL_WORLD}: expected {local + 1} to {world} (LOCAL_RANK is {local}, WORLD_SIZE is {world}), "
                f"got {local_world}"
            )
        port = _number(environ, "MASTER_PORT")
        if not 0 < port < 65536:
            raise ConfigError(f"MASTER_PORT: expected 1 to 65535, got {port}")
        return cls(
            rank=rank,
            world=world,
            local_rank=local,
            local_world=local_world,
            address=(environ["MASTER_ADDR"], port),
            supervised=_JOB in environ,
            job="" if environ.get(_JOB) == _NO_JOB else environ.get(_JOB, ""),
        )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}: expected an integer of at least 0, got {text!r}")
    return int(text)
