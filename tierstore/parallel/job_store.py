"""What a job remembers between attempts: ``torchrun --max-restarts`` starts all ranks anew, and they must know whether the
stores that they find are their own.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from tierstore.errors import PeerError
from tierstore.parallel.layout import RankEnvironment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore


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
    """A store kept by ``torchrun``, where ranks meet; it outlives each attempt. Connects on first use."""

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
    """The store of the job that this process belongs to; in memory if ``torchrun`` keeps none."""
    if environment.supervised and agents_store_given(environ):
        return SharedJobStore(environment.address, timeout_s)
    return MemoryJobStore()


# Where the ranks of one attempt meet ------------------------------------------------------------------------
#
# ``torchrun`` starts ranks again when one has failed, and when nodes come or go. If its agents give ranks a store of
# theirs, that store outlives attempts, and the addresses that dead ranks left there must not be taken for those of
# the living. No number identifies an attempt: each agent counts the restarts that it requested itself, and none counts
# those for a new node. So rank 0 opens a store that ends with its process, and publishes its port in the agents' store.
# Another rank may find the port of an earlier attempt there: it retries until it connects and is the first with its
# number.


#: In the agents' store: port and token of rank 0's store. In rank 0's store: its token, which tells it from another
#: program that has taken the port since.
_MEETING, _TOKEN = "tierstore/meeting", "token"
_PROBE_S, _AGAIN_S = 5.0, 0.05


def agents_store_given(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``torchrun`` keeps the store at MASTER_ADDR for its ranks."""
    environ = os.environ if environ is None else environ
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_store(
    environment: RankEnvironment, timeout_s: float, environ: Mapping[str, str] | None = None
) -> TCPStore:
    """The store of this attempt's ranks. Raises PeerError, and RuntimeError if nothing listens at the address."""
    from torch._C._distributed_c10d import TCPStore

    host, port = environment.address
    timeout = timedelta(seconds=timeout_s)
    if not agents_store_given(environ):
        first = environment.rank == 0
        return TCPStore(host, port, environment.world, first, timeout, multi_tenant=True)
    agents = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    if environment.rank == 0:
        own = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        token = secrets.token_hex(16)
        own.set(_TOKEN, token)
        agents.set(_MEETING, f"{own.port} {token}")
        return own
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if agents.check([_MEETING]):
            found, token = agents.get(_MEETING).decode().split()
            store = _entered((host, int(found)), token, environment.rank)
            if store is not None:
                store.set_timeout(timeout)
                return store
        time.sleep(_AGAIN_S)
    reason = (
        f"rank {environment.rank} of {environment.world} found no rank 0 within {timeout_s:g} s at {host}:{port}, where "
        "torchrun sent it; with nodes that come and go torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )
    raise PeerError("joining", reason)


def _entered(address: tuple[str, int], token: str, rank: int) -> TCPStore | None:
    """The store of rank 0 at ``address``; None if it is gone, or ``rank`` was there in an earlier attempt."""
    from torch._C._distributed_c10d import TCPStore

    try:
        # The store's own attempts to connect are slow and noisy.
        socket.create_connection(address, _PROBE_S).close()
        store = TCPStore(
            *address, is_master=False, timeout=timedelta(seconds=_PROBE_S), wait_for_workers=False
        )
        if store.get(_TOKEN).decode() != token or store.add(f"rank {rank}", 1) > 1:
            return None
    except (OSError, RuntimeError):
        return None
    return store
