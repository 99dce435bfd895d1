"""libCacheSim's oracleGeneral: records of 24 bytes, u32 time, u64 object, u32 size, i64 next access (-1: none)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tierstore.errors import DataError
from tierstore.lab.importers.keys import KeyOptions, KeyRecords
from tierstore.lab.importers.source import open_source
from tierstore.trace.format import EventColumns
from tierstore.trace.records import RecordTable

ORACLE_RECORD = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
_BLOCK = 1 << 17  # records


@dataclass(frozen=True, kw_only=True)
class OracleGeneralOptions(KeyOptions):
    """Options of oracleGeneral traces. Without ``frame_bytes`` every object is one frame, whatever its size."""


class OracleGeneralImporter:
    """Reads fixed records. Times and next accesses are checked for sense and not kept."""

    def __init__(self, path: Path, options: OracleGeneralOptions) -> None:
        self._path = path
        self._records = KeyRecords(options)

    def chunks(self) -> Iterator[EventColumns]:
        at = 0
        with open_source(self._path) as file:
            while block := file.read(_BLOCK * ORACLE_RECORD.itemsize):
                whole = len(block) // ORACLE_RECORD.itemsize
                if len(block) % ORACLE_RECORD.itemsize:
                    end = at + whole * ORACLE_RECORD.itemsize
                    raise DataError(
                        f"{self._path}: byte {end}: expected a record of {ORACLE_RECORD.itemsize} bytes, "
                        f"found {len(block) % ORACLE_RECORD.itemsize}"
                    )
                rows = np.frombuffer(block, ORACLE_RECORD)
                wrong = np.flatnonzero(rows["next"] < -1)
                if len(wrong):
                    byte = at + int(wrong[0]) * ORACLE_RECORD.itemsize
                    raise DataError(
                        f"{self._path}: byte {byte}: expected a next access of at least -1, "
                        f"found {int(rows['next'][wrong[0]])}: not an oracleGeneral trace?"
                    )
                yield self._records.events(rows["key"].tolist(), rows["size"].astype(np.int64))
                at += len(block)
        yield self._records.last_step()

    @property
    def resized(self) -> int:
        """Requests whose size was not that of their key's first; known once the chunks have been read."""
        return self._records.resized

    def table(self) -> RecordTable:
        return self._records.table()

    def names(self) -> Iterator[str]:
        return self._records.names()
