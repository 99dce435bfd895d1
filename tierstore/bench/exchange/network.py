"""What is between the nodes of ``bench exchange``: links of the kernel, or emulated ones within each process.

With network namespaces each node is one; its ranks share one limited cable, and meet each other on its loopback. A
latency is the kernel's where it has ``netem``. Otherwise links are those of ``tierstore.links``: processes share none, so
each rank has its part of the bandwidth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tierstore.bench.processes.namespaces import (
    RankNamespace,
    delay_namespace,
    limit_namespace,
    probe_netem,
    rank_namespaces,
)
from tierstore.capabilities import Capability, Finding
from tierstore.links import LinkConfig

#: What a namespace sends before its first limit.
_UNLIMITED = 10 << 30


class Network(StrEnum):
    """Who limits what goes between nodes."""

    AUTO = "auto"  # the kernel where it can delay messages, else the process
    NAMESPACES = "namespaces"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """The links between nodes. ``namespaces``: by node, none where the process limits."""

    namespaces: Sequence[RankNamespace]
    netem: Finding

    def of_ranks(self, each: int) -> list[RankNamespace]:
        """Where the ranks live, ``each`` of them on a node."""
        return [namespace for namespace in self.namespaces for _ in range(each)]

    def limit(self, node: LinkConfig, each: int) -> LinkConfig:
        """Limits what each node sends to ``node``, and returns what a rank's own link has to emulate."""
        if not self.namespaces:
            return replace(node, bandwidth=node.bandwidth // each)
        for namespace in self.namespaces:
            if self.netem.available:
                delay_namespace(namespace, bandwidth=node.bandwidth, latency_s=node.latency)
            else:
                limit_namespace(namespace, node.bandwidth)
        return LinkConfig() if self.netem.available else replace(node, bandwidth=0)

    def describe(self) -> str:
        """One line for the head of a benchmark."""
        if not self.namespaces:
            return f"links between nodes are emulated within each process: {self.netem.reason}"
        latency = (
            "the kernel's" if self.netem.available else f"emulated within each process: {self.netem.reason}"
        )
        return (
            f"each node is a network namespace with a cable of its own; the latency of messages is {latency}"
        )


@contextlib.contextmanager
def node_links(network: Network, nodes: int) -> Iterator[NodeLinks]:
    """The links between ``nodes`` nodes. Raises CapabilityError where NAMESPACES are asked for and cannot be."""
    netem = Finding(False, "as asked") if network is Network.PROCESS else probe_netem()
    if network is Network.PROCESS or (network is Network.AUTO and not netem.available):
        yield NodeLinks((), netem)
        return
    with rank_namespaces(nodes, bandwidth=_UNLIMITED, setting=Capability.ON) as (_, namespaces):
        yield NodeLinks(namespaces, netem)
