"""Ranks in network namespaces: what is sent takes its time, or the capability says why there are none."""

import os
import subprocess
import sys
import time

import pytest

from tierstore.bench.namespaces import probe_namespaces, rank_namespaces
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
    """1 MiB at 4 MiB/s, of which the bucket's content goes at once: 0.1875 s."""
    finding = probe_namespaces()
    if not finding.available:
        return
    with rank_namespaces(2, bandwidth=_BANDWIDTH) as ranks:
        assert [rank.environment["MASTER_ADDR"] for rank in ranks] == [ranks[0].address] * 2
        one = ranks[0].command([sys.executable, "-c", _RECEIVE])
        with subprocess.Popen(one, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            begun = time.monotonic()
            sender = ranks[1].command([sys.executable, "-c", _SEND, ranks[0].address, str(1 << 20)])
            subprocess.run(sender, check=True)
            assert receiver.stdout.readline() == f"{1 << 20}\n"
            assert time.monotonic() - begun >= ((1 << 20) - _BURST) / _BANDWIDTH
        mine = {rank.name for rank in ranks}
        assert mine <= namespaces()
    assert not mine & namespaces()


def test_no_bandwidth_means_no_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with rank_namespaces(2, bandwidth=0) as none:
        assert none == []


def test_an_error_says_why_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert probe_namespaces().reason == "only root may create network namespaces"
    message = r"^--namespace-bandwidth: no network namespaces here: only root"
    with pytest.raises(CapabilityError, match=message), rank_namespaces(2, bandwidth=1):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert probe_namespaces().reason == "there is no ip and no tc"


@pytest.mark.parametrize(("ranks", "bandwidth"), [(0, 1), (1, -1)])
def test_what_is_no_network_is_refused(ranks: int, bandwidth: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 rank"), rank_namespaces(ranks, bandwidth=bandwidth):
        pass
