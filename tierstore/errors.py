"""Every error that tierstore raises on purpose.

::

    TierstoreError
    ├── ConfigError (ValueError)      a configuration key, option or value that cannot work
    ├── DataError (ValueError)        training data that cannot be read or is too short
    ├── BudgetError (MemoryError)     a budget too small for what must fit; names the minimum
    ├── CapabilityError               a capability set to ON that this machine lacks
    ├── PeerError                     a collective failed: a rank died, hung or lost its connection
    └── StoreError
        ├── StoreMissingError         no store where one was expected
        ├── StoreExistsError          a store where none was expected
        ├── StoreInUseError           another process holds the store; names its pid
        ├── StoreFormatError          not a store, another version, or another shape
        ├── StorePoisonedError        a write or sync failed: only the last commit is readable
        └── ChecksumError             a section on disk is not what was written

Failures of the operating system stay what they are: ``OSError`` with errno and path.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "BudgetError",
    "CapabilityError",
    "ChecksumError",
    "ConfigError",
    "DataError",
    "PeerError",
    "StoreError",
    "StoreExistsError",
    "StoreFormatError",
    "StoreInUseError",
    "StoreMissingError",
    "StorePoisonedError",
    "TierstoreError",
]


class TierstoreError(Exception):
    """Base of these errors."""


class ConfigError(TierstoreError, ValueError):
    """A configuration key, option or value that cannot work."""


class DataError(TierstoreError, ValueError):
    """Training data that cannot be read, or too little of it."""


class BudgetError(TierstoreError, MemoryError):
    """A budget is too small for what must fit in it at once. The message names the minimum."""


class CapabilityError(TierstoreError):
    """A capability was set to ON and this machine lacks it. The message says why."""


class PeerError(TierstoreError):
    """A collective failed: another rank died, hung or lost its connection.

    ``operation``: the collective; ``rank``: the global rank that failed, or None if unknown.
    """

    def __init__(self, operation: str, reason: str, *, rank: int | None = None) -> None:
        super().__init__(f"{operation}: {'a rank' if rank is None else f'rank {rank}'} failed: {reason}")
        self.operation = operation
        self.rank = rank


class StoreError(TierstoreError):
    """Something is wrong with a store directory or its use."""


class StoreMissingError(StoreError):
    """There is no store at the path given."""


class StoreExistsError(StoreError):
    """There is a store already at the path given."""


class StoreInUseError(StoreError):
    """Another process holds the store's lease."""


class StoreFormatError(StoreError):
    """The directory is not a store, or one of another version or shape."""


class StorePoisonedError(StoreError):
    """A write or sync failed earlier. The store accepts no more work; its last commit stays readable."""


class ChecksumError(StoreError):
    """A section read from disk does not match its checksum."""


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add ``path`` to an OSError of the block that names no file, as those of writing and closing do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
