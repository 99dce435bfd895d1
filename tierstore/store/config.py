"""Configuration of a parameter store."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from tierstore._native import GroupOrder, StepClock
from tierstore.cache.config import CacheConfig
from tierstore.capabilities import Capability
from tierstore.config import check_least, key
from tierstore.errors import ConfigError, DataError
from tierstore.links import LinkConfig
from tierstore.machine_profile import load_io_point
from tierstore.units import format_bytes


class IoBackendName(Enum):
    """How a store reads and writes: by io_uring, by threads, or in mapped persistent memory. ``AUTO``: io_uring, or threads
    if the kernel grants no ring.
    """

    AUTO = "auto"
    URING = "uring"
    THREADS = "threads"
    PMEM = "pmem"


class StoreAccess(Enum):
    """The access of an open store. Several processes may read a store at once, while none writes."""

    WRITE = "write"
    READ = "read"  # writes no byte to the store's directories


@dataclass(frozen=True, kw_only=True)
class IoConfig:
    """Settings of the I/O engine."""

    backend: IoBackendName = key(IoBackendName.AUTO, "io_uring, pread/pwrite threads, or mapped files (PMem)")
    direct: Capability = key(Capability.AUTO, "O_DIRECT")
    map_sync: Capability = key(Capability.AUTO, "MAP_SYNC, with backend pmem (else msync)")
    mapped_weights: Capability = key(
        Capability.AUTO,
        "on the CPU, compute with frozen experts in mapped files (backend pmem), uncopied; auto: if DAX",
    )
    huge_pages: Capability = key(Capability.AUTO, "2 MiB pages for arenas")
    threads: int = key(4, "threads for the backends threads and pmem")
    queue_depth: int = key(0, "transfers in flight (0: the best of `bench io`, else 32)")
    chunk_bytes: int = key(0, "size of one transfer (0: the best of `bench io`, else 1 MiB)", size=True)
    compute_threads: int = key(0, "threads for checksums, copies and AdamW (0: one a core, at most 4)")

    def __post_init__(self) -> None:
        check_least(self, 1, "threads", table="io.")
        check_least(self, 0, "queue_depth", "compute_threads", table="io.")
        if self.chunk_bytes < 0 or self.chunk_bytes % 4096:
            raise ConfigError(f"io.chunk_bytes: expected 0 or a multiple of 4096, got {self.chunk_bytes}")
        for name in ("map_sync", "mapped_weights"):
            if getattr(self, name) is Capability.ON and self.backend is not IoBackendName.PMEM:
                raise ConfigError(f"io.{name}: on needs io.backend = pmem, got {self.backend.value}")


@dataclass(frozen=True, kw_only=True)
class WearConfig:
    """The write budget of a store, and whether it discards free blocks."""

    daily_write_budget: int = key(0, "bytes written per day; further writes wait (0: no limit)", size=True)
    endurance: int = key(0, "bytes that the drive is rated to take (TBW; 0: unknown)", size=True)
    discard: Capability = key(Capability.AUTO, "return unused space to the file system (hole punching)")

    def __post_init__(self) -> None:
        check_least(self, 0, "daily_write_budget", "endurance", table="wear.")


@dataclass(frozen=True, kw_only=True)
class StripeConfig:
    """Stripe directories, each on a drive of its own, over which a store spreads its records.

    A store remembers its directories: name them again only if they have moved, or to add more. The other lists are empty
    or have one item for each directory, the store's own first.
    """

    directories: tuple[Path, ...] = key((), "directories on further drives (remembered by the store)")
    limits: tuple[int, ...] = key(
        (), "most bytes of records in each directory, the store's own first (0: no limit)", size=True
    )
    weights: tuple[float, ...] = key((), "shares of new records in each (empty: by measured bandwidth)")
    bandwidths: tuple[int, ...] = key(
        (), "speed limit of each directory, bytes per second (0: no limit)", size=True
    )

    def __post_init__(self) -> None:
        for name in ("limits", "bandwidths"):
            if any(value < 0 for value in getattr(self, name)):
                raise ConfigError(f"stripe.{name}: expected sizes of at least 0, got {getattr(self, name)}")
        if not all(math.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ConfigError(f"stripe.weights: expected numbers above 0, got {self.weights}")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    """Budgets and policies of one open store. They change neither results nor stored content.

    ``host_budget`` (bytes) is allocated up front. ``lookahead`` (bytes) is the part of it that speculation may hold.
    ``retain`` is the number of snapshots kept. ``layers`` are the layers with cached records: with ``Scope.LAYER`` the
    budget is divided equally among them (an existing store knows its own). ``disk`` limits the speed of reads and
    write-backs (not of syncs). ``group_order``: the order in which an access that does not fit is cut into groups;
    ``KEY`` if several ranks must work on the same experts in the same order. ``stripe`` spreads records over more drives;
    ``wear`` limits the bytes written to them. ``clock``: the unit of time of the cache's policy; in a store opened to
    read, ``ACCESSES`` replaces ``LATE_ACCESSES``.
    """

    host_budget: int = 256 << 20
    lookahead: int = 0
    retain: int = 0
    layers: tuple[int, ...] = ()
    cache: CacheConfig = field(default_factory=CacheConfig)
    io: IoConfig = field(default_factory=IoConfig)
    disk: LinkConfig = field(default_factory=LinkConfig)
    group_order: GroupOrder = GroupOrder.RESIDENT_FIRST
    stripe: StripeConfig = field(default_factory=StripeConfig)
    wear: WearConfig = field(default_factory=WearConfig)
    clock: StepClock = StepClock.LATE_ACCESSES

    def __post_init__(self) -> None:
        check_least(self, 1, "host_budget")
        check_least(self, 0, "lookahead", "retain")
        if any(layer < 0 for layer in self.layers):
            raise ConfigError(f"layers: expected numbers of at least 0, got {self.layers}")
        if self.group_order is GroupOrder.GIVEN:
            raise ConfigError("group_order: expected RESIDENT_FIRST or KEY, got GIVEN, a device's order")


DEFAULT_CHUNK_BYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class TransferTuning:
    """The tuning parameters of an engine, and the reason for each."""

    chunk_bytes: int
    queue_depth: int
    chunk_reason: str
    depth_reason: str

    def __str__(self) -> str:
        chunk, depth = format_bytes(self.chunk_bytes), self.queue_depth
        if self.chunk_reason == self.depth_reason:
            return f"{chunk}, {depth} in flight ({self.chunk_reason})"
        return f"{chunk} ({self.chunk_reason}), {depth} in flight ({self.depth_reason})"


def tune(io: IoConfig, directory: Path | None) -> TransferTuning:
    """The tuning of an engine for files in ``directory`` (None: anywhere). Raises OSError if it does not exist."""
    chunk, depth, reason = DEFAULT_CHUNK_BYTES, DEFAULT_QUEUE_DEPTH, "built in"
    if directory is not None and not (io.chunk_bytes and io.queue_depth):
        try:
            point = load_io_point(directory)
        except (DataError, OSError) as error:
            # A store opens all the same: a profile only makes it faster.
            reason = f"built in, because the profile cannot be read: {error}"
        else:
            if point is not None:
                chunk, depth = point.chunk_bytes, point.queue_depth
                reason = f"measured {point.measured}"
            else:
                reason = "built in, because `tierstore bench io` has not measured this disk"
    return TransferTuning(
        chunk_bytes=io.chunk_bytes or chunk,
        queue_depth=io.queue_depth or depth,
        chunk_reason="as configured" if io.chunk_bytes else reason,
        depth_reason="as configured" if io.queue_depth else reason,
    )
