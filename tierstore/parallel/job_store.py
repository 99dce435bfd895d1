"""What a job remembers from one attempt to the next: ``torchrun --max-restarts`` starts all ranks anew, and they must
know whether the stores that they find are their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from tierstore.parallel.environment import RankEnvironment
from tierstore.parallel.meeting import agents_store_given

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class JobStore(Protocol):
    """Keys that stay set until the job ends. Any rank may set one; all ranks see the same."""

    def set(self, key: str) -> None: ...
    def has(self, key: str) -> bool: ...


class MemoryJobStore:
    """The store of a job that is never restarted: it ends with the process."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def set(self, key: str) -> None:
        self._keys.add(key)

    def has(self, key: str) -> bool:
        return key in self._keys


class SharedJobStore:
    """``torchrun`` keeps it, in the store where ranks meet, which outlives each attempt. Connects on first use."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None

    def _connected(self) -> Store:
        if self._store is None:
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            host, port = self._address
            store = TCPStore(host, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
            self._store = PrefixStore("tierstore/job", store)
        return self._store

    def set(self, key: str) -> None:
        self._connected().set(key, "1")

    def has(self, key: str) -> bool:
        return self._connected().check([key])


def open_job_store(
    environment: RankEnvironment, timeout_s: float, environ: Mapping[str, str] | None = None
) -> JobStore:
    """The store of the job that this process belongs to; in memory where ``torchrun`` keeps none."""
    if environment.supervised and agents_store_given(environ):
        return SharedJobStore(environment.address, timeout_s)
    return MemoryJobStore()
