"""Configuration of a parameter store."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from tierstore.cache.config import CacheConfig, GroupOrder
from tierstore.capabilities import Capability
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig

__all__ = ["Capability", "IoBackendName", "IoConfig", "StoreConfig"]


class IoBackendName(Enum):
    AUTO = "auto"
    URING = "uring"
    THREADS = "threads"
    PMEM = "pmem"


@dataclass(frozen=True, kw_only=True)
class IoConfig:
    """How the engine moves bytes."""

    backend: IoBackendName = field(
        default=IoBackendName.AUTO,
        metadata={"help": "io_uring, pread/pwrite threads, or mapped files (PMem)"},
    )
    direct: Capability = field(default=Capability.AUTO, metadata={"help": "O_DIRECT"})
    map_sync: Capability = field(
        default=Capability.AUTO, metadata={"help": "MAP_SYNC, with backend pmem (else msync)"}
    )
    huge_pages: Capability = field(default=Capability.AUTO, metadata={"help": "2 MiB pages for arenas"})
    threads: int = field(default=4, metadata={"help": "threads of the backends threads and pmem"})
    queue_depth: int = field(
        default=0,
        metadata={"help": "transfers in flight at once (0: as `tierstore bench io` found best, else 32)"},
    )
    chunk_bytes: int = field(
        default=0,
        metadata={
            "size": True,
            "help": "size of one transfer (0: as `tierstore bench io` found best, else 1 MiB)",
        },
    )
    compute_threads: int = field(
        default=0, metadata={"help": "threads for checksums, copies and AdamW (0: one a core, at most 4)"}
    )

    def __post_init__(self) -> None:
        for name, least in (("threads", 1), ("queue_depth", 0), ("compute_threads", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"io.{name}: expected at least {least}, got {getattr(self, name)}")
        if self.chunk_bytes < 0 or self.chunk_bytes % 4096:
            raise ConfigError(f"io.chunk_bytes: expected 0 or a multiple of 4096, got {self.chunk_bytes}")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Budgets and policies of one open store. None of them changes what is computed, or what is stored.

    ``host_budget`` (bytes) is allocated up front, whole. ``lookahead`` (bytes) is what speculation may hold
    of it. ``retain`` is how many snapshots are kept. ``layers`` are the layers that have cached records: with
    ``Scope.LAYER`` the budget is divided equally among them (a store that is opened knows its own).
    ``disk`` limits the speed of reads and write-backs (not of syncs). ``group_order``: how an access that does not
    fit is cut into groups; ``KEY`` where several ranks must work on the same experts in the same order.
    """

    host_budget: int = 256 << 20
    lookahead: int = 0
    retain: int = 0
    layers: tuple[int, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    io: IoConfig = field(default_factory=IoConfig)
    disk: LinkConfig = field(default_factory=LinkConfig)
    group_order: GroupOrder = GroupOrder.RESIDENT_FIRST

    def __post_init__(self) -> None:
        if self.host_budget < 1:
            raise ConfigError(f"host_budget: expected a positive size, got {self.host_budget}")
        if self.lookahead < 0:
            raise ConfigError(f"lookahead: expected at least 0 bytes, got {self.lookahead}")
        if any(layer < 0 for layer in self.layers):
            raise ConfigError(f"layers: expected numbers of at least 0, got {self.layers}")
        if self.retain < 0:
            raise ConfigError(f"retain: expected at least 0 snapshots, got {self.retain}")
