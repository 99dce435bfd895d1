"""A restart with another number of ranks: the store is made over for them, without a person (``parallel.elastic``).

``torchrun --nnodes 1:4 --max-restarts 9`` starts a job again with as many ranks as there are. The store of an earlier
attempt is then that of another layout. Rank 0 makes it over beside (``reshard``), and exchanges the two by name::

    STORE                            as the earlier attempt left it
    STORE, STORE.resharded           the new one is whole; a kill until here starts again
    STORE.before, STORE.resharded    a kill here: the next start gives the new one its name
    STORE, STORE.before              the new one is trained with
    STORE                            from its first commit that all ranks have

So at every instant one of the two is whole under a known name. Nothing else may be kept under these names.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import ConfigError, StoreExistsError, StoreFormatError, TierstoreError
from tierstore.model.config import ModelConfig
from tierstore.model.spec import ModelSpec
from tierstore.parallel import Mesh
from tierstore.parallel.config import Elastic
from tierstore.parallel.layout import Layout
from tierstore.store.directories import rank_directories
from tierstore.store.disk.home import IDENTITY, fsync_directory
from tierstore.store.opening import read_states
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard
from tierstore.train.resharding.reading import stored_layout
from tierstore.train.state import STATE_KEY, TrainState, table_of

#: The tokens of a run's documents, which belong to no layout.
_TOKENS = "tokens"


@dataclass(frozen=True)
class MadeOver:
    """A store was made over from layout ``before`` to ``after``; training stands at ``step``."""

    before: Layout
    after: Layout
    step: int

    def describe(self) -> str:
        """One line for the head of a run."""
        return (
            f"the store was for {self.before.world} rank{'s' * (self.before.world > 1)}; made over for "
            f"{self.after.world} at step {self.step}, sums go on in another order, and the old one is "
            "kept until the next commit"
        )


def before_name(store: Path) -> Path:
    """Where the store of the earlier layout is until the new one has a commit."""
    return store.with_name(f"{store.name}.before")


def follow_ranks(config: TrainConfig, opening: Opening, mesh: Mesh) -> MadeOver | None:
    """Makes the store over where it is that of another layout, before it is opened; a collective. None where there was
    nothing to do.

    Raises on all ranks what went wrong on rank 0: StoreError, ConfigError, OSError.
    """
    if config.parallel.elastic is Elastic.OFF or opening is Opening.CREATE:
        return None
    found: MadeOver | TierstoreError | OSError | None = None
    if mesh.world.rank == 0:
        try:
            _check_places(config)
            found = _follow(config.store, mesh.layout, _model(config))
        except (TierstoreError, OSError) as error:
            found = error
    result = mesh.world.all_gather_object(found)[0]
    if isinstance(result, Exception):
        raise result
    return result if isinstance(result, MadeOver) else None


def drop_before(store: Path) -> None:
    """Removes the store of the earlier layout, if there is one: the new one has been committed by all ranks."""
    old = before_name(store)
    if _is_store(old):
        shutil.rmtree(old, ignore_errors=True)


def _model(config: TrainConfig) -> ModelSpec | None:
    return None if isinstance(config.model, ModelConfig) else config.model


def _check_places(config: TrainConfig) -> None:
    if config.stripe.directories:
        raise ConfigError(
            "parallel.elastic: expected off with stripe.directories: a store is made over in one directory"
        )
    ranks = rank_directories(config.store)
    linked = next((path for path in ranks if path.is_symlink()), None)
    if linked is not None:
        raise ConfigError(f"parallel.elastic: expected off: {linked} is a link to another place")


def _follow(store: Path, wanted: Layout, model: ModelSpec | None) -> MadeOver | None:
    beside, old = store.with_name(f"{store.name}.resharded"), before_name(store)
    if not store.exists() and _is_store(old) and _is_store(beside):
        _rename(beside, store)  # killed between the two
        _move_tokens(old, store)
    held = held_layout(store)
    if held is None or held == wanted:
        return None
    for path in (beside, old):
        if path.exists() and not _is_store(path):
            raise StoreExistsError(f"{path}: parallel.elastic keeps a store there, and this is none")
        # A new one that never got its name, or an old one whose successor is whole.
        shutil.rmtree(path, ignore_errors=True)
    done = reshard(store, beside, wanted, model=model)
    _rename(store, old)
    _rename(beside, store)
    _move_tokens(old, store)
    return MadeOver(held, wanted, done.step)


def held_layout(store: Path) -> Layout | None:
    """For which ranks the store of a run at ``store`` was made; None where there is none. Raises StoreError, OSError."""
    if not _is_store(store):
        return None
    directory = (rank_directories(store) or [store])[0]
    states = read_states(directory, STATE_KEY)
    if not states:
        return None
    state = TrainState.unpack({STATE_KEY: next(iter(states.values()))}, where=str(directory))
    try:
        return stored_layout(table_of(state.conditions["parallel"]))
    except (AssertionError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StoreFormatError(f"{directory}: the conditions of the run are damaged: {error}") from error


def _is_store(path: Path) -> bool:
    return (path / IDENTITY).exists() or bool(rank_directories(path))


def _rename(source: Path, target: Path) -> None:
    os.rename(source, target)
    fsync_directory(target.absolute().parent)


def _move_tokens(old: Path, store: Path) -> None:
    if (old / _TOKENS).is_dir() and not (store / _TOKENS).exists():
        os.rename(old / _TOKENS, store / _TOKENS)
