"""Ranks in their own network namespaces, with a token-bucket limit on what each sends.

The limit of ``tierstore.links`` is emulated beside the real messages; this one is the kernel's, on the messages
themselves: one bridge, one virtual cable to each rank, and ``tc tbf`` at the rank's end. It needs root, ``ip`` and
``tc``; if they are missing, the capability says why.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.capabilities import Finding
from tierstore.errors import CapabilityError, ConfigError

_INTERFACE = "eth0"
#: Size of a bucket: a few of the largest frames that a virtual cable carries.
_BURST_BYTES = 256 << 10
#: How long a message may wait for tokens before the kernel drops it and TCP must send it again.
_QUEUE_MS = 1000


@dataclass(frozen=True, slots=True)
class RankNamespace:
    """The namespace of one rank. ``environment``: the variables, besides its rank, that it needs to find the others."""

    name: str
    address: str
    environment: dict[str, str]

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs ``arguments`` inside."""
        return ["ip", "netns", "exec", self.name, *arguments]


def limit_namespace(namespace: RankNamespace, bandwidth: int) -> None:
    """From now on, limit ``namespace`` to sending ``bandwidth`` bytes a second. Raises CapabilityError."""
    bucket = ["rate", f"{bandwidth}bps", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms"]
    _run(["tc", "-n", namespace.name, "qdisc", "replace", "dev", _INTERFACE, "root", "tbf", *bucket])


def probe_namespaces() -> Finding:
    """Whether network namespaces can be made here: makes one and removes it."""
    if os.geteuid() != 0:
        return Finding(False, "only root may create network namespaces")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return Finding(False, f"there is no {' and no '.join(missing)}")
    try:
        with _network(f"tierstore-probe-{os.getpid()}", 1, 1 << 20):
            return Finding(True, "a limited namespace was made")
    except CapabilityError as error:
        return Finding(False, str(error))


@contextlib.contextmanager
def rank_namespaces(
    ranks: int, *, bandwidth: int, option: str = "--namespace-bandwidth"
) -> Iterator[list[RankNamespace]]:
    """Yield ``ranks`` namespaces, each limited to sending ``bandwidth`` bytes a second; none for a bandwidth of 0. They are
    removed at exit, and a process that still runs in one loses its network.

    Raises CapabilityError that names ``option`` if this machine cannot make them, ConfigError for an invalid number.
    """
    if ranks < 1 or bandwidth < 0:
        raise ConfigError(
            f"namespaces: expected at least 1 rank and 0 bytes a second, got {ranks}, {bandwidth}"
        )
    if not bandwidth:
        yield []
        return
    finding = probe_namespaces()
    if not finding:
        raise CapabilityError(f"{option}: no network namespaces here: {finding.reason}")
    # A process may have several networks at a time.
    with _network(f"tierstore-{os.getpid()}-{secrets.token_hex(4)}", ranks, bandwidth) as made:
        yield made


@contextlib.contextmanager
def _network(prefix: str, ranks: int, bandwidth: int) -> Iterator[list[RankNamespace]]:
    with contextlib.ExitStack() as stack:
        hub = f"{prefix}-hub"
        _add_namespace(hub, stack)
        _ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge", "up")
        made = []
        for rank in range(ranks):
            name, cable, address = f"{prefix}-{rank}", f"rank{rank}", f"10.77.{rank // 250}.{rank % 250 + 1}"
            _add_namespace(name, stack)
            _ip("link", "add", cable, "netns", hub, "type", "veth", "peer", "name", _INTERFACE, "netns", name)
            _ip("-n", hub, "link", "set", cable, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{address}/16", "dev", _INTERFACE)
            _ip("-n", name, "link", "set", _INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            environment = {"GLOO_SOCKET_IFNAME": _INTERFACE, "MASTER_ADDR": "10.77.0.1"}
            made.append(RankNamespace(name, address, environment))
            limit_namespace(made[-1], bandwidth)
        yield made


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    # Its cables are removed with it.
    stack.callback(_ip, "netns", "delete", name)


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = done.stderr.strip().splitlines()[:1]
        raise CapabilityError(f"{' '.join(command)}: {reason[0] if reason else done.returncode}")
