"""What the ranks of a run agree on: where each keeps its store, at which commit all take up, and when a commit
is everybody's.

A rank's own commit is a prepare. It is acknowledged when all ranks have theirs; only then is the commit before it
let go. So at any instant there is a step that every rank has, whenever each of them was killed, and a resume takes
the newest such step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tierstore.errors import StoreError, StoreExistsError, StoreFormatError, StoreMissingError, TierstoreError
from tierstore.parallel import Mesh
from tierstore.store.opening import IDENTITY, OpenAt, read_identity, read_states
from tierstore.store.parameter_store import ParameterStore
from tierstore.train.state import STATE_KEY, TrainState

__all__ = [
    "Agreed",
    "Opening",
    "agree",
    "commit_everywhere",
    "rank_directories",
    "rank_directory",
    "rank_file",
    "restarted",
]


class Opening(Enum):
    """Whether a run starts a store or goes on with one; a restarted job does whichever its ranks were at."""

    CREATE = "create"
    RESUME = "resume"
    RESTART = "restart"


@dataclass(frozen=True)
class Agreed:
    """How this rank opens its store: CREATE or RESUME, and at which of its commits."""

    opening: Opening
    at: OpenAt = OpenAt.LAST


@dataclass(frozen=True)
class _Found:
    """What one rank has: the steps that its store can be opened at, or why there is none."""

    steps: dict[OpenAt, int]
    problem: TierstoreError | OSError | None = None

    @property
    def exists(self) -> bool:
        return bool(self.steps) or not isinstance(self.problem, StoreMissingError)


def rank_directory(store: Path, rank: int, world: int) -> Path:
    """Where rank ``rank`` of ``world`` keeps its store: a directory of its own, which may be a link to its own drive."""
    return store if world == 1 else store / f"rank-{rank:04d}"


def rank_directories(store: Path) -> list[Path]:
    """The stores of several ranks that there are under ``store``, in rank order; none for a store of one."""
    return sorted(found.parent for found in store.glob(f"rank-*/{IDENTITY}"))


def rank_file(path: Path | None, rank: int) -> Path | None:
    """The file that rank ``rank`` writes where all were told ``path``: rank 0 that one, others one beside it."""
    if path is None or rank == 0:
        return path
    return path.with_name(f"{path.stem}.rank-{rank:04d}{path.suffix}")


def restarted(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``torchrun --max-restarts`` has started this job before."""
    environ = os.environ if environ is None else environ
    count = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return count.isdigit() and int(count) > 0


def agree(store: Path, wanted: Opening, mesh: Mesh) -> Agreed:
    """How every rank opens its store under ``store``; a collective. All ranks agree, or all raise.

    RESUME takes the newest step that every rank has. RESTART does so too, and creates when no step was ever
    acknowledged. Raises StoreExistsError, StoreMissingError, StoreInUseError, StoreFormatError, StoreError.
    """
    rank, world = mesh.world.rank, mesh.world.size
    directory = rank_directory(store, rank, world)
    _refuse_other_layout(store, world)
    if world == 1 and wanted is not Opening.RESTART:
        return _agree_alone(directory, wanted)
    found: list[_Found] = mesh.world.all_gather_object(_look(directory))
    if wanted is Opening.CREATE:
        taken = [number for number, other in enumerate(found) if other.exists]
        if taken:
            where = rank_directory(store, taken[0], world)
            raise StoreExistsError(
                f"{where}: there is a store here already; --resume goes on with it, --store DIR "
                "starts another"
            )
        return Agreed(Opening.CREATE)
    for number, other in enumerate(found):
        if other.problem is not None and not (wanted is Opening.RESTART and not other.exists):
            raise type(other.problem)(f"rank {number}: {other.problem}")
    common = set.intersection(*(set(other.steps.values()) for other in found))
    if common:
        newest = max(common)
        own = found[rank].steps
        return Agreed(Opening.RESUME, OpenAt.LAST if own.get(OpenAt.LAST) == newest else OpenAt.PREVIOUS)
    steps = ", ".join(f"rank {number}: {sorted(other.steps.values())}" for number, other in enumerate(found))
    if wanted is Opening.RESTART and all(set(other.steps.values()) <= {0} for other in found):
        # Killed while they were made: some have their first commit, and nobody has acknowledged it.
        if found[rank].steps:
            _discard(directory)
        mesh.world.barrier()
        return Agreed(Opening.CREATE)
    raise StoreError(f"{store}: there is no step that every rank has ({steps})")


def _agree_alone(directory: Path, wanted: Opening) -> Agreed:
    if wanted is Opening.RESUME:
        read_identity(directory)
    elif (directory / IDENTITY).exists():
        raise StoreExistsError(
            f"{directory}: there is a store here already; --resume goes on with it, --store DIR starts another"
        )
    return Agreed(wanted)


def _refuse_other_layout(store: Path, world: int) -> None:
    """Raises StoreFormatError for the stores of another number of ranks."""
    several = len(rank_directories(store))
    present = 1 if (store / IDENTITY).exists() else several
    if present > world or (world == 1 and several) or (world > 1 and not several and present):
        raise StoreFormatError(
            f"{store}: the store of {present} rank{'s' * (present > 1)}, and this run has {world}; tierstore reshard "
            f"makes one for {world}"
        )


def _look(directory: Path) -> _Found:
    try:
        states = read_states(directory, STATE_KEY)
    except (TierstoreError, OSError) as error:
        return _Found({}, error)
    where = str(directory)
    try:
        return _Found(
            {at: TrainState.unpack({STATE_KEY: raw}, where=where).position for at, raw in states.items()}
        )
    except StoreFormatError as error:
        return _Found({}, error)


def _discard(directory: Path) -> None:
    """Takes the identity of a store that was never acknowledged: a creation clears the rest away."""
    (directory / IDENTITY).unlink()


def commit_everywhere(
    store: ParameterStore, mesh: Mesh, state: Mapping[str, bytes], snapshot: str | None
) -> int:
    """One commit of all ranks; a collective. Returns this rank's generation. Raises OSError, PeerError."""
    if mesh.world.size == 1:
        return store.commit(state, snapshot=snapshot)
    generation = store.prepare(state, snapshot=snapshot)
    mesh.world.barrier()
    store.acknowledge()
    return generation
