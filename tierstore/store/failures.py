"""Whether an open store can be used, and its failures in the store's own words."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierstore import _native
from tierstore.cache.host_cache import HostCache
from tierstore.errors import ChecksumError, StoreError, StorePoisonedError
from tierstore.store.config import StoreAccess
from tierstore.store.index.live import LiveIndex


class Failures:
    """Whether the store may still be used, and waiting that raises its errors."""

    def __init__(
        self,
        directory: Path,
        cache: HostCache,
        live: LiveIndex,
        access: StoreAccess = StoreAccess.WRITE,
    ) -> None:
        self._directory = directory
        self._cache = cache
        self._live = live
        self._access = access
        self._owner = os.getpid()
        self._poison = ""
        self.closed = False

    def poison(self, reason: str, error: BaseException | None = None) -> None:
        """From now on every use is refused, with the first reason given (and its ``error``): only the last commit stands."""
        if not self._poison:
            self._poison = reason if error is None else f"{reason}: {str(error) or type(error).__name__}"

    @contextlib.contextmanager
    def poisoning(self, what: str) -> Iterator[None]:
        """Poisons the store when the block raises."""
        try:
            yield
        except BaseException as error:
            self.poison(what, error)
            raise

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the store: the engine's threads are not here."""
        return os.getpid() != self._owner

    def check(self) -> None:
        """Raises StoreError or StorePoisonedError unless the store can be used."""
        if self.closed:
            raise StoreError(f"{self._directory}: the store is closed")
        if self.forked:
            raise StoreError(
                f"{self._directory}: the store was opened by process {self._owner}, of which this one is a "
                "fork: only the process that opened it can use it"
            )
        reason = self._poison or self._cache.engine.poisoned or self._cache.broken
        if reason:
            raise StorePoisonedError(f"{self._directory}: {reason}; reopen the store at its last commit")

    def check_writable(self, what: str) -> None:
        """``check``, and raises StoreError where the store was opened to read; ``what`` was to be done."""
        self.check()
        if self._access is StoreAccess.READ:
            raise StoreError(f"{self._directory}: {what}: the store was opened to read (StoreAccess.READ)")

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Failures of the engine, naming key, section and file: ChecksumError, and OSError of transfers."""
        try:
            yield
        except _native.ChecksumMismatch as error:
            message, path, offset, section = error.args
            what = self._live.explain(path, offset, section)
            raise ChecksumError(f"{what}, {path}: {message}") from error
        except OSError as error:
            offset = getattr(error, "file_offset", None)
            if offset is None:
                raise
            what = self._live.explain(str(error.filename), offset)
            raise OSError(error.errno, f"{what}: {error.strerror}", error.filename) from error

    def wait(self, tickets: Sequence[int]) -> None:
        with self.translated():
            self._cache.engine.wait_all([ticket for ticket in tickets if ticket])
