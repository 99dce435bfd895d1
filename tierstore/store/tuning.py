"""Transfer size and depth of a store: as its configuration says, else as they were measured best on its disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import DataError
from tierstore.io_profile import load_io_point
from tierstore.store.config import IoConfig
from tierstore.units import format_bytes

DEFAULT_CHUNK_BYTES = 1 << 20
DEFAULT_QUEUE_DEPTH = 32


@dataclass(frozen=True, kw_only=True)
class TransferTuning:
    """What an engine is made with, and why each is what it is."""

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
    """The tuning of an engine for files in ``directory`` (None: anywhere). Raises OSError without such a directory."""
    chunk, depth, reason = DEFAULT_CHUNK_BYTES, DEFAULT_QUEUE_DEPTH, "built in"
    if directory is not None and not (io.chunk_bytes and io.queue_depth):
        try:
            point = load_io_point(directory)
        except (DataError, OSError) as error:
            # A store opens all the same: a profile makes it faster, no more.
            reason = f"built in, for the profile cannot be read: {error}"
        else:
            if point is not None:
                chunk, depth = point.chunk_bytes, point.queue_depth
                reason = f"measured {point.measured}"
            else:
                reason = "built in, for `tierstore bench io` has not measured this disk"
    return TransferTuning(
        chunk_bytes=io.chunk_bytes or chunk,
        queue_depth=io.queue_depth or depth,
        chunk_reason="as configured" if io.chunk_bytes else reason,
        depth_reason="as configured" if io.queue_depth else reason,
    )
