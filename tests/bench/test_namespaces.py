"""Ranks in network namespaces: what is sent takes its time, or the capability says why there are none."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from tierstore.bench.namespaces import namespaces_limited_to, probe_namespaces, rank_namespaces
from tierstore.capabilities import Capability
from tierstore.errors import CapabilityError, ConfigError

_RECEIVE = """
import socket
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    total = 0
    while part := connection.recv(1 << 16):
        total += len(part)
    print(total, flush=True)
"""
_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000)) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
_BANDWIDTH, _BURST = 4 << 20, 256 << 10


def namespaces() -> set[str]:
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    return {line.split()[0] for line in found.splitlines() if line}


def test_a_rank_sends_no_faster_than_its_bucket_fills() -> None:
    """1 MiB at 4 MiB/s, of which the bucket's content goes at once: 0.1875 s. Elsewhere: the reason is told."""
    finding = probe_namespaces()
    with rank_namespaces(2, bandwidth=_BANDWIDTH) as (resolution, ranks):
        assert bool(resolution) is finding.available
        assert resolution.reason
        if not resolution:
            assert ranks == []
            return
        assert [rank.environment["MASTER_ADDR"] for rank in ranks] == [ranks[0].address] * 2
        one = ranks[0].command([sys.executable, "-c", _RECEIVE])
        with subprocess.Popen(one, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "ready\n"
            begun = time.monotonic()
            sender = ranks[1].command([sys.executable, "-c", _SEND, ranks[0].address, str(1 << 20)])
            subprocess.run(sender, check=True)
            assert receiver.stdout.readline() == f"{1 << 20}\n"
            assert time.monotonic() - begun >= ((1 << 20) - _BURST) / _BANDWIDTH
        mine = {rank.name for rank in ranks}
        assert mine <= namespaces()
    assert not mine & namespaces()


def test_off_probes_nothing() -> None:
    with rank_namespaces(2, bandwidth=1, setting=Capability.OFF) as (resolution, ranks):
        assert (bool(resolution), ranks, resolution.reason) == (False, [], "switched off")


def test_who_may_not_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe_namespaces().reason == "only root may create network namespaces"
    with (
        pytest.raises(CapabilityError, match="only root"),
        rank_namespaces(2, bandwidth=1, setting=Capability.ON),
    ):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe_namespaces().reason == "there is no ip and no tc"


def test_what_an_option_asks_for_is_had_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with namespaces_limited_to(0, 2) as none:
        assert none == []
    finding = probe_namespaces()
    if finding.available:
        with namespaces_limited_to(_BANDWIDTH, 2) as made:
            assert len(made) == 2
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with (
        pytest.raises(
            CapabilityError, match=r"^--namespace-bandwidth: no network namespaces here: only root"
        ),
        namespaces_limited_to(_BANDWIDTH, 2),
    ):
        pass


@pytest.mark.parametrize(("ranks", "bandwidth"), [(0, 1), (1, 0)])
def test_what_is_no_network_is_refused(ranks: int, bandwidth: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 rank"), rank_namespaces(ranks, bandwidth=bandwidth):
        pass
