"""Agreement between the ranks of a run: each rank's store, the commit from which all resume, and when a commit is
acknowledged.

A rank's own commit is a prepare. It is acknowledged when all ranks have theirs; only then is the previous commit dropped.
So at any instant there is a step that every rank has, whenever each of them is killed, and a resume takes the newest such
step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from tierstore.errors import (
    ConfigError,
    StoreError,
    StoreExistsError,
    StoreFormatError,
    StoreMissingError,
    TierstoreError,
)
from tierstore.model.store_schema import IMPORT_KEY, STATE_KEY, TrainState, table_of
from tierstore.parallel import Mesh, RankGroup
from tierstore.store.committing import Keep
from tierstore.store.core import StoreCore
from tierstore.store.disk.home import IDENTITY, rank_directories, rank_directory
from tierstore.store.reading import OpenAt, read_states
from tierstore.train.config import TrainConfig
from tierstore.train.state import differences

T = TypeVar("T")

#: Settings that may differ between ranks.
_OWN = ("store", "stripe", "io", "device", "links", "wear")
#: Keys of the job's key-value store, for later attempts: the ranks agreed how to open stores; a step was acknowledged.
_BEGUN, _ACKNOWLEDGED = "begun", "acknowledged"
#: Ranks that work apart meet this often, so that no wait for a slower one exceeds the limit for peers.
_MEET_S = 1.0


class Opening(Enum):
    """Whether a run creates a store or resumes one. RESTART: as an earlier attempt of the job began."""

    CREATE = "create"
    RESUME = "resume"
    RESTART = "restart"


@dataclass(frozen=True)
class Agreed:
    """How this rank opens its store: CREATE or RESUME, and the commit."""

    opening: Opening
    at: OpenAt = OpenAt.LAST


@dataclass(frozen=True)
class _Found:
    """One rank's store: the steps at which it can be opened and the number of ranks it was made for (0: not recorded), or
    why there is no store.
    """

    steps: dict[OpenAt, int]
    ranks: int
    #: Whether it comes from an import that no run has resumed yet.
    fresh: bool
    #: The job that committed last, if that job is elastic.
    job: str = ""
    problem: TierstoreError | OSError | None = None

    @property
    def exists(self) -> bool:
        return bool(self.steps) or not isinstance(self.problem, StoreMissingError)


def rank_file(path: Path | None, rank: int) -> Path | None:
    """The file that rank ``rank`` writes for the common ``path``: rank 0 writes it, others a file beside it. All ranks
    share a pipe or a device.
    """
    if path is None or rank == 0 or (path.exists() and not path.is_file()):
        return path
    return path.with_name(f"{path.stem}.rank-{rank:04d}{path.suffix}")


def own_store(mesh: Mesh, job: str) -> bool:
    """Whether an earlier attempt of this job began the store whose last commit is by ``job``. The job's key-value store
    is lost with the node that kept it.
    """
    return mesh.job_store.has(_BEGUN) or _same_job(mesh, job)


def _same_job(mesh: Mesh, job: str) -> bool:
    return bool(job) and job == mesh.environment.job


def agree(store: Path, wanted: Opening, mesh: Mesh) -> Agreed:
    """How every rank opens its store under ``store``; a collective. All ranks agree, or all raise.

    RESUME takes the newest step that every rank has. RESTART is for a job that ``torchrun`` may have started before: the
    store of an earlier attempt is resumed, or created anew if none of its steps was acknowledged; without one, it is a
    CREATE. Raises StoreExistsError, StoreMissingError, StoreInUseError, StoreFormatError, StoreError.
    """
    rank, world = mesh.world.rank, mesh.world.size
    begun = mesh.job_store.has(_BEGUN)  # before the ranks meet: afterwards rank 0 sets it
    directory = rank_directory(store, rank, world)
    _refuse_other_layout(store, world)
    found: list[_Found] = mesh.world.all_gather_object(_look(directory))
    for other in found:
        if other.ranks not in (0, world):
            raise _other_layout(store, other.ranks, world)
    if wanted is Opening.RESTART and not (begun or any(_same_job(mesh, other.job) for other in found)):
        wanted = Opening.CREATE
    if wanted is Opening.CREATE and not all(other.fresh for other in found):
        _refuse_existing(store, found)
        if rank == 0:
            mesh.job_store.set(_BEGUN)
        return Agreed(Opening.CREATE)
    for number, other in enumerate(found):
        if other.problem is not None and not (wanted is Opening.RESTART and not other.exists):
            where = f"rank {number}: " if world > 1 else ""
            raise type(other.problem)(f"{where}{other.problem}")
    common = _newest_common(found)
    if common is not None:
        if rank == 0:
            mesh.job_store.set(_BEGUN)
        return Agreed(Opening.RESUME, common[rank])
    acknowledged = mesh.job_store.has(_ACKNOWLEDGED) or any(any(other.steps.values()) for other in found)
    if wanted is not Opening.RESTART or acknowledged:
        raise _nothing_common(store, found)
    # Killed during creation: some have their first commit, which no rank has acknowledged.
    if found[rank].steps:
        (directory / IDENTITY).unlink()  # creating a store clears the rest
    mesh.world.barrier()
    return Agreed(Opening.CREATE)


def check_alike(config: TrainConfig, conditions: Mapping[str, object], mesh: Mesh) -> None:
    """Raises ConfigError on all ranks, naming the first difference, unless all have the same configuration; a collective.

    Only paths and I/O settings may differ: the rest decides what is computed, or in which order ranks send.
    """
    settings = {name: value for name, value in config.settings().items() if name not in _OWN}
    settings["data"] = {**table_of(settings["data"]), "paths": None}
    tasks = table_of(settings["tasks"])
    settings["tasks"] = {name: {**table_of(task), "paths": None} for name, task in tasks.items()}
    # Rows follow the order of the tasks.
    settings["order of tasks"] = list(tasks)
    crc32 = table_of(conditions["data"]).get("crc32")
    given = {**settings, "conditions": {**conditions, "data": crc32, "parallel": None}}
    ranks = mesh.world.all_gather_object(given)
    for number, other in enumerate(ranks):
        different = differences(ranks[0], other)
        if different:
            raise ConfigError(f"rank {number} was given another configuration than rank 0: {different[0]}")


def _refuse_existing(store: Path, found: Sequence[_Found]) -> None:
    taken = [number for number, other in enumerate(found) if other.exists]
    if not taken:
        return
    where = rank_directory(store, taken[0], len(found))
    advice = "--resume continues its run, --store DIR starts another"
    if len(taken) < len(found):
        advice = (
            f"only {len(taken)} of {len(found)} ranks have one, left by a run that was killed while it created them: "
            f"remove {store}, or give another --store"
        )
    raise StoreExistsError(f"{where}: there is a store here already; {advice}")


def newest_common(store: Path, directories: Sequence[Path]) -> list[OpenAt]:
    """For each store in ``directories``, the commit with the newest step that all have.

    Raises StoreMissingError, StoreInUseError, StoreFormatError; StoreError naming ``store`` if there is no such step.
    """
    found = [_look(directory) for directory in directories]
    for other in found:
        if other.problem is not None:
            raise other.problem
    common = _newest_common(found)
    if common is None:
        raise _nothing_common(store, found)
    return common


def _newest_common(found: Sequence[_Found]) -> list[OpenAt] | None:
    common = set.intersection(*(set(other.steps.values()) for other in found))
    if not common:
        return None
    newest = max(common)
    return [OpenAt.LAST if other.steps.get(OpenAt.LAST) == newest else OpenAt.PREVIOUS for other in found]


def _nothing_common(store: Path, found: Sequence[_Found]) -> StoreError:
    steps = ", ".join(
        f"rank {number}: {sorted(other.steps.values()) if other.steps else other.problem}"
        for number, other in enumerate(found)
    )
    return StoreError(f"{store}: no step is in the stores of all ranks ({steps})")


def _refuse_other_layout(store: Path, world: int) -> None:
    """Raises StoreFormatError if the directories show the stores of another number of ranks."""
    several = len(rank_directories(store))
    present = 1 if (store / IDENTITY).exists() else several
    if present > world or (world == 1 and several) or (world > 1 and not several and present):
        raise _other_layout(store, present, world)


def _other_layout(store: Path, present: int, world: int) -> StoreFormatError:
    return StoreFormatError(
        f"{store}: the store of {present} rank{'s' * (present > 1)}, and this run has {world}; tierstore reshard "
        f"makes one for {world}"
    )


def _look(directory: Path) -> _Found:
    ranks, fresh, job = 0, True, ""
    try:
        states = read_states(directory, STATE_KEY)
        if not states:
            imports = read_states(directory, IMPORT_KEY)
            TrainState.unpack({IMPORT_KEY: b""} if imports else {}, where=str(directory))
        steps = {}
        for at, raw in states.items():
            state = TrainState.unpack({STATE_KEY: raw}, where=str(directory))
            steps[at], ranks = state.position, state.ranks
            fresh = fresh and not state.begun
            job = state.job if at is OpenAt.LAST else job
    except (TierstoreError, OSError) as error:
        # A traceback would keep all callers' variables, and so the memory of a closed session, in a reference cycle.
        return _Found({}, 0, False, problem=error.with_traceback(None))
    return _Found(steps, ranks, fresh, job)


def commit_everywhere(store: StoreCore, mesh: Mesh, state: Mapping[str, bytes], snapshot: str | None) -> int:
    """One commit of all ranks; a collective. Returns this rank's generation. Raises OSError, PeerError."""
    if mesh.world.size == 1:
        generation = store.committer.commit(state, snapshot=snapshot)
        mesh.job_store.set(_ACKNOWLEDGED)
        return generation
    generation = store.committer.commit(state, snapshot=snapshot, keep=Keep.PREVIOUS)
    mesh.world.barrier()
    store.committer.acknowledge()
    if mesh.world.rank == 0:
        mesh.job_store.set(_ACKNOWLEDGED)
    return generation


# Long work of single ranks ----------------------------------------------------------------------------------


class _StoppedError(Exception):
    """Ends the work of all ranks because one of them has to stop."""


def work_apart(
    world: RankGroup, work: Callable[[Callable[[], None]], T], stopped: Callable[[], bool] = lambda: False
) -> list[T] | None:
    """The results of ``work`` on all ranks, in rank order; None if ``stopped`` was true on one of them. A collective.

    ``work`` may take long, on any of the ranks: it calls its argument often, at which the ranks meet from time to time.
    Raises what ``work`` raises, and PeerError.
    """
    met_s = time.monotonic()

    def meet() -> None:
        nonlocal met_s
        if time.monotonic() - met_s >= _MEET_S:
            _meet(world, (), stopped())
            met_s = time.monotonic()

    try:
        own = (work(meet),)
        while not all(results := _meet(world, own, stopped())):
            pass
    except _StoppedError:
        return None
    return [result for (result,) in results]


def _meet(world: RankGroup, own: tuple[T, ...], stop: bool) -> list[tuple[T, ...]]:
    """The result of every rank that has one. Raises _StoppedError on all ranks if one of them stops."""
    answers: list[tuple[tuple[T, ...], bool]] = world.all_gather_object((own, stop))
    if any(stops for _, stops in answers):
        raise _StoppedError
    return [result for result, _ in answers]
