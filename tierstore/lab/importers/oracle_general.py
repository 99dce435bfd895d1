"""libCacheSim's oracleGeneral: records of 24 bytes, u32 time, u64 object, u32 size, i64 next access (-1: none)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tierstore.errors import DataError
from tierstore.lab.importers.keys import KeyOptions, KeyRequests
from tierstore.lab.importers.source import open_source

ORACLE_RECORD = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
_BLOCK = 1 << 17  # records


def oracle_general_requests(path: Path, options: KeyOptions) -> Iterator[KeyRequests]:
    """Objects and their sizes. Times and next accesses are checked for sense and not kept. Raises DataError."""
    at = 0
    with open_source(path, options.window_log) as file:
        while block := file.read(_BLOCK * ORACLE_RECORD.itemsize):
            left_over = len(block) % ORACLE_RECORD.itemsize
            if left_over:
                end = at + len(block) - left_over
                raise DataError(
                    f"{path}: byte {end}: expected a record of {ORACLE_RECORD.itemsize} bytes, found {left_over}"
                )
            rows = np.frombuffer(block, ORACLE_RECORD)
            wrong = np.flatnonzero(rows["next"] < -1)
            if len(wrong):
                byte = at + int(wrong[0]) * ORACLE_RECORD.itemsize
                raise DataError(
                    f"{path}: byte {byte}: expected a next access of at least -1, "
                    f"found {int(rows['next'][wrong[0]])}: not an oracleGeneral trace?"
                )
            yield rows["key"].tolist(), rows["size"].astype(np.int64)
            at += len(block)
