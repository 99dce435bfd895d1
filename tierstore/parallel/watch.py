"""A death watch: a rank that ends without leaving takes the others down within seconds, with the reason printed.

Every rank holds one TCP connection to a hub on rank 0, silent until something happens. The kernel closes a dead process's
connection whatever killed it, so its end is noticed at once, by the hub or, if rank 0 died, by all; the hub passes it on. A
rank that fails sends its reason before it ends. Keepalive probes detect a machine that vanished. Under ``torchrun`` each
rank also watches its parent through a pidfd, since a killed ``torchrun`` cannot stop its ranks.

What a rank then does: the watch prints the reason and calls ``on_failure`` (which aborts the communicators, so that
collectives raise), and the process has ``grace_s`` to end by itself. After that the watch ends it: a store's last commit
is intact at any time. One thread sleeps in ``select``; another runs ``on_failure``, since aborting may wait for a device
that waits for the dead rank, which must not delay the deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from tierstore.errors import PeerError
from tierstore.parallel.collectives import Failure, RankGroup
from tierstore.parallel.layout import RankEnvironment

EXIT_STATUS = 1  # of a process that the watch had to end
_LINE_BYTES = 65536
_ENDED = "its process ended"


class DeathWatch:
    """Watches the ranks of ``world`` from its construction (a collective) until ``leave``.

    ``failure``: the first failure found, or None; it never changes back. Methods may be called from any thread.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        world: RankGroup,
        *,
        grace_s: float,
        timeout_s: float,
        on_failure: Callable[[], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._environment = environment
        self._grace_s = grace_s
        self._end = end
        self._lock = threading.Lock()  # guards failure and the sending on connections
        self._failure: Failure | None = None
        self._found = threading.Event()
        self._left = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._peers = _connect(environment, world, timeout_s)
        for rank, connection in self._peers.items():
            self._selector.register(connection, selectors.EVENT_READ, rank)
        self._parent = _parent_pidfd() if environment.supervised else None
        if self._parent is not None:
            self._selector.register(self._parent, selectors.EVENT_READ, None)
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._aborting = threading.Thread(target=on_failure, name="abort", daemon=True)
        self._thread = threading.Thread(target=self._watch, name="death watch", daemon=True)
        self._thread.start()

    def blame(self, within_s: float) -> Failure | None:
        """The failure that ended the job, if it is known within ``within_s``."""
        self._found.wait(within_s)
        return self._failure

    def leave(self, error: BaseException | None = None) -> None:
        """This rank is done, or failed with ``error``, which the other ranks receive.

        After any rank's failure, ``on_failure`` has returned when this returns, or the process is ended after ``grace_s``.
        """
        if self._left.is_set():
            return
        if error is None:
            self._tell({"left": self._environment.rank})
        elif self._failure is None:
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            blamed = error.rank if isinstance(error, PeerError) else None
            rank = self._environment.rank if blamed is None else blamed
            self._tell({"failed": rank, "reason": reason.split("\n", 1)[0]})
        self._left.set()
        os.write(self._wake_write, b".")
        self._thread.join()
        if error is not None or self._failure is not None:
            self._abort()
        self._selector.close()
        for connection in self._peers.values():
            connection.close()
        for descriptor in (self._wake_read, self._wake_write, self._parent):
            if descriptor is not None:
                os.close(descriptor)

    def _abort(self) -> None:
        if self._failure is None:  # otherwise the thread has been started already
            self._aborting.start()
        self._aborting.join(self._grace_s)
        if self._aborting.is_alive():
            self._say(f"communicators not aborted within {self._grace_s:g} s of the failure; ending now")
            self._end(EXIT_STATUS)

    # The thread --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        buffers = dict.fromkeys(self._peers, b"")
        while not self._left.is_set() and self._failure is None:
            for key, _ in self._selector.select():
                if key.fd == self._parent:
                    self._fail(Failure(None, "the torchrun process that started this rank ended"))
                elif key.data is not None:
                    self._read(key.data, buffers)
        if self._failure is not None and not self._left.wait(self._grace_s):
            self._say(f"still running {self._grace_s:g} s after the failure; ending now")
            self._end(EXIT_STATUS)

    def _read(self, rank: int, buffers: dict[int, bytes]) -> None:
        connection = self._peers[rank]
        try:
            data = connection.recv(_LINE_BYTES)
        except OSError as error:
            data, reason = b"", f"{_ENDED} or its machine vanished ({error.strerror})"
        else:
            reason = _ENDED
        *lines, buffers[rank] = (buffers[rank] + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "left" in message:
                self._selector.unregister(connection)
                return
            self._fail(Failure(message["failed"], message["reason"]))
        if not data:
            self._selector.unregister(connection)
            self._fail(Failure(rank, reason))

    def _fail(self, failure: Failure) -> None:
        with self._lock:
            if self._failure is not None or self._left.is_set():
                return
            self._failure = failure
        if self._environment.rank == 0 and failure.rank is not None:
            self._tell({"failed": failure.rank, "reason": failure.reason})
        who = "the job" if failure.rank is None else f"rank {failure.rank}"
        self._say(f"{who} failed: {failure.reason}; ending within {self._grace_s:g} s")
        self._found.set()
        self._aborting.start()

    def _tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for connection in self._peers.values():
                with contextlib.suppress(OSError):  # that rank is gone itself
                    connection.sendall(line)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"tierstore: rank {self._environment.rank}: {text}", file=sys.stderr, flush=True)


# Connections ------------------------------------------------------------------------------------------------


def _connect(environment: RankEnvironment, world: RankGroup, timeout_s: float) -> dict[int, socket.socket]:
    """The connections by rank. Rank 0: one from every other rank; the others: one to rank 0."""
    if world.size == 1:
        return {}
    listener = None
    offer: tuple[int, str] | None = None
    if environment.rank == 0:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=world.size)
        listener.settimeout(timeout_s)
        offer = (listener.getsockname()[1], secrets.token_hex(16))
    offer = world.all_gather_object(offer)[0]
    assert offer is not None
    port, token = offer
    try:
        if listener is None:
            connection = socket.create_connection((environment.address[0], port), timeout_s)
            connection.sendall(f"{token} {environment.rank}\n".encode())
            return {0: _kept_alive(connection)}
        with listener:
            return _accept(listener, token, world.size - 1)
    except OSError as error:
        reason = f"no connection with the death watch of rank 0 at {environment.address[0]}:{port}: {error}"
        raise PeerError("joining", reason) from error


def _accept(listener: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
    peers: dict[int, socket.socket] = {}
    while len(peers) < count:
        connection, _ = listener.accept()
        connection.settimeout(listener.gettimeout())
        hello = b""
        while not hello.endswith(b"\n") and (part := connection.recv(1)):
            hello += part
        given, _, rank = hello.decode("ascii", "replace").strip().partition(" ")
        if given == token and rank.isdigit():
            peers[int(rank)] = _kept_alive(connection)
        else:  # another program connected to the port
            connection.close()
    return peers


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return connection


def _parent_pidfd() -> int:
    """A descriptor that becomes readable when the parent ends. Raises PeerError if it has already ended."""
    parent = os.getppid()
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError as error:
        raise PeerError("joining", "the torchrun process that started this rank ended") from error
    if os.getppid() != parent:
        os.close(descriptor)
        raise PeerError("joining", "the torchrun process that started this rank ended")
    return descriptor
