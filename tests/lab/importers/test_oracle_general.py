"""oracleGeneral records, written by hand with struct."""

from __future__ import annotations

import struct

import pytest

from tierstore.errors import DataError
from tierstore.lab.importing import SourceKind


def oracle(*rows):
    return b"".join(struct.pack("<IQIq", *row) for row in rows)


TRACE = oracle((1, 2**60, 5000, 2), (2, 7, 1, -1), (3, 2**60, 6000, -1))


def test_by_hand(imported, packed):
    accesses, trace, keys = imported(packed(TRACE), SourceKind.ORACLE_GENERAL)
    assert [records for *_, records, _ in accesses] == [[0], [1], [0]]
    assert keys == [str(2**60), "7"]
    assert trace.header.table.bytes[:, 0].tolist() == [5000, 1]  # the size of the first request
    assert trace.header.table.frames.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_sizes_in_frames(imported):
    _, trace, _ = imported(TRACE, SourceKind.ORACLE_GENERAL, frame_bytes="4KiB")
    assert trace.header.table.frames[:, 0].tolist() == [2, 1]
    assert trace.header.capacity_frames == 3


def test_what_is_none(imported):
    with pytest.raises(DataError, match="byte 48: expected a record of 24 bytes, found 23"):
        imported(TRACE[:-1], SourceKind.ORACLE_GENERAL)
    with pytest.raises(DataError, match="byte 24: expected a next access of at least -1, found -9"):
        imported(TRACE[:24] + oracle((1, 1, 1, -9)), SourceKind.ORACLE_GENERAL)
