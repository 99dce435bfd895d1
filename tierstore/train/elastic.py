"""Restarts with another number of ranks, which reshard the store automatically (``parallel.elastic``).

``torchrun --nnodes 1:4 --max-restarts 9`` restarts a job with the remaining ranks. The store of an earlier attempt then
has another layout. Rank 0 reshards it into a directory beside it, and exchanges the two by renaming::

    STORE                            as the earlier attempt left it
    STORE, STORE.resharded           the new one is whole; a kill until here starts again
    STORE.before, STORE.resharded    a kill here: the next start gives the new one its name
    STORE, STORE.before              the new one is trained with
    STORE                            from its first commit that all ranks have

So at every instant one of the two is complete under a known name. These names are reserved.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tierstore.errors import ConfigError, PeerError, StoreExistsError, TierstoreError
from tierstore.model.spec import BuiltInSpec
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.parallel import MemoryJobStore, Mesh
from tierstore.parallel.config import Elastic
from tierstore.stats import OnProgress
from tierstore.store.disk.home import IDENTITY, fsync_directory, rank_directories
from tierstore.store.reading import read_states
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening, own_store, work_apart
from tierstore.train.resharding import Resharded, reshard
from tierstore.train.stored_model import stored_layout

#: The tokens of a run's documents, which do not depend on the layout.
_TOKENS = "tokens"


def before_name(store: Path) -> Path:
    """The path of the earlier layout's store until the new one has a commit."""
    return store.with_name(f"{store.name}.before")


def describe_restart(resharded_from: Resharded) -> str:
    """One line for the head of a run."""
    before, after = resharded_from.before.world, resharded_from.after.world
    return (
        f"the store was for {before} rank{'s' * (before > 1)}; resharded for {after} at step {resharded_from.step}: sums "
        "are taken in another order from here on, and the old store is kept until the next commit"
    )


def follow_ranks(config: TrainConfig, opening: Opening, mesh: Mesh) -> Resharded | None:
    """Reshards a store of another layout, before it is opened; a collective. Returns None if there was nothing to do.

    Raises rank 0's error on all ranks: StoreError, ConfigError, OSError.
    """
    if config.parallel.elastic is Elastic.OFF or opening is Opening.CREATE:
        return None

    def work(meet: Callable[[], None]) -> Resharded | TierstoreError | OSError | None:
        """Rank 0's result, or its error."""
        if mesh.world.rank:
            return None
        try:
            _check(config, mesh, opening)
            return _follow(config, mesh, opening, lambda done, total: meet())
        except PeerError:
            raise
        except (TierstoreError, OSError) as error:
            return error

    results = work_apart(mesh.world, work)
    assert results is not None
    if isinstance(results[0], TierstoreError | OSError):
        raise results[0]
    return results[0]


def drop_before(store: Path) -> None:
    """Removes the earlier layout's store, if any: all ranks have committed the new one."""
    old = before_name(store)
    if _is_store(old):
        shutil.rmtree(old, ignore_errors=True)


def _check(config: TrainConfig, mesh: Mesh, opening: Opening) -> None:
    """Raises ConfigError if the job cannot recognise its store, or the store cannot be exchanged by renaming."""
    environment = mesh.environment
    restarts = opening is Opening.RESTART and environment.supervised and not environment.job
    if restarts and isinstance(mesh.job_store, MemoryJobStore):
        raise ConfigError(
            "parallel.elastic: expected torchrun --rdzv-id JOB: these torchrun agents keep no key-value store, so "
            "restarted ranks recognise their store by the job's id"
        )
    if config.stripe.directories:
        raise ConfigError(
            "parallel.elastic: expected off with stripe.directories: a store is resharded within one directory"
        )
    linked = next((path for path in rank_directories(config.store) if path.is_symlink()), None)
    if linked is not None:
        raise ConfigError(f"parallel.elastic: expected off: {linked} is a symbolic link")


def _follow(config: TrainConfig, mesh: Mesh, opening: Opening, progress: OnProgress) -> Resharded | None:
    store, wanted = config.store, mesh.layout
    beside, old = store.with_name(f"{store.name}.resharded"), before_name(store)
    if not store.exists() and _is_store(old) and _is_store(beside):
        _rename(beside, store)  # killed between the two
        _move_tokens(old, store)
    state = held_state(store)
    if state is None or (opening is Opening.RESTART and not own_store(mesh, state.job)):
        return None  # no store, or another job's, which is refused
    if stored_layout(state, where=str(store)) == wanted:
        return None
    for path in (beside, old):
        if path.exists() and not _is_store(path):
            raise StoreExistsError(
                f"{path}: parallel.elastic needs this path for a store, but it is not a store"
            )
        # A new store that never got its name, or an old one whose successor is complete.
        shutil.rmtree(path, ignore_errors=True)
    blocks = config.parallel.stage_blocks if wanted.stages > 1 else ()
    whole = config.spec.whole or config.spec  # the configuration may be that of a stage
    model = None if isinstance(whole, BuiltInSpec) else whole  # the store itself describes the built-in model
    done = reshard(store, beside, wanted, progress, model=model, stage_blocks=blocks)
    _rename(store, old)
    _rename(beside, store)
    _move_tokens(old, store)
    return done


def held_state(store: Path) -> TrainState | None:
    """The state of the run at ``store``, from its first rank; None without a store. Raises StoreError, OSError."""
    if not _is_store(store):
        return None
    directory = (rank_directories(store) or [store])[0]
    states = read_states(directory, STATE_KEY)
    if not states:
        return None
    return TrainState.unpack({STATE_KEY: next(iter(states.values()))}, where=str(directory))


def _is_store(path: Path) -> bool:
    return (path / IDENTITY).exists() or bool(rank_directories(path))


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_directory(target.absolute().parent)


def _move_tokens(old: Path, store: Path) -> None:
    if (old / _TOKENS).is_dir() and not (store / _TOKENS).exists():
        os.rename(old / _TOKENS, store / _TOKENS)
