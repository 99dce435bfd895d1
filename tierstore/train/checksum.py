"""The checksum over the records of all ranks: it reads whole stores, so it is computed where one asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from tierstore import _native
from tierstore.train.trainer import Trainer

#: The ranks meet this often, so that none waits for a slower one longer than peers may.
_MEET_S = 1.0


class _StoppedError(Exception):
    """A rank was asked to stop."""


def records_checksum(
    trainer: Trainer,
    *,
    progress: Callable[[int, int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int | None:
    """CRC-32C over every record's content in key order; of several ranks, that of their checksums in rank order.

    A collective: all ranks get the same, None if ``stopped`` was true on one of them. ``progress`` is called with this
    rank's records done and in all. Raises ChecksumError, PeerError, OSError.
    """
    world = trainer.mesh.world
    met_s = time.monotonic()

    def meet(own: int | None) -> list[int | None]:
        nonlocal met_s
        answers = world.all_gather_object((own, stopped()))
        met_s = time.monotonic()
        if any(stop for _, stop in answers):
            raise _StoppedError
        return [crc for crc, _ in answers]

    def done(records: int, total: int) -> None:
        if progress is not None:
            progress(records, total)
        if time.monotonic() - met_s >= _MEET_S:
            meet(None)

    try:
        own = trainer.store.records_crc32c(done)
        crcs = meet(own)
        while None in crcs:
            crcs = meet(own)
    except _StoppedError:
        return None
    return own if len(crcs) == 1 else _native.crc32c(np.array(crcs, "<u4"))
