"""Where the ranks of one attempt meet: a store in which no earlier attempt has left anything.

``torchrun`` starts ranks again when one has failed, and when nodes come or go. Where its agents give ranks a store of
theirs, that store outlives attempts, and the addresses that dead ranks left there must not be taken for those of the
living. No number tells attempts apart: each agent counts the restarts that it asked for itself, and none counts those for
a new node. So rank 0 opens a store that ends with its process, and leaves its port with the agents. What another rank
finds there may be of an earlier attempt: it goes on looking unless it gets through, and is the first of its number to come.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from tierstore.errors import PeerError
from tierstore.parallel.environment import RankEnvironment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

#: In the agents' store: port and token of rank 0's. In rank 0's: its token, so that a port that another program has taken
#: since is told from it.
_MEETING, _TOKEN = "tierstore/meeting", "token"
_PROBE_S, _AGAIN_S = 5.0, 0.05


def agents_store_given(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``torchrun`` keeps the store at MASTER_ADDR for its ranks."""
    environ = os.environ if environ is None else environ
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meeting_store(
    environment: RankEnvironment, timeout_s: float, environ: Mapping[str, str] | None = None
) -> TCPStore:
    """The store of this attempt's ranks. Raises PeerError, and RuntimeError where there is nothing to connect to."""
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
    """The store of rank 0 at ``address``; None where it is gone, or ``rank`` was there in an earlier attempt."""
    from torch._C._distributed_c10d import TCPStore

    try:
        # The store's own attempts to connect are long, and not quiet.
        socket.create_connection(address, _PROBE_S).close()
        store = TCPStore(
            *address, is_master=False, timeout=timedelta(seconds=_PROBE_S), wait_for_workers=False
        )
        if store.get(_TOKEN).decode() != token or store.add(f"rank {rank}", 1) > 1:
            return None
    except (OSError, RuntimeError):
        return None
    return store
