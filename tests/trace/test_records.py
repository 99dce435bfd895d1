"""Tables of records: runs stand for what they are runs of."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.trace.records import RecordTable, TraceRecord

SMALL = TraceRecord(0, (1, 0, 0), (100, 0, 0), 1)
LARGE = TraceRecord(1, (1, 2, 1), (100, 200, 100), 3)

records = st.builds(
    TraceRecord,
    st.integers(0, 2),
    st.tuples(*[st.integers(0, 2)] * 3),
    st.tuples(*[st.integers(0, 2**40)] * 3),
    st.integers(0, 7),
)


def test_runs_by_hand():
    table = RecordTable([SMALL, SMALL, LARGE, SMALL])
    assert list(table.runs()) == [(2, SMALL), (1, LARGE), (1, SMALL)]
    assert len(table) == 4
    assert [table[number] for number in range(4)] == [SMALL, SMALL, LARGE, SMALL]
    assert table[-2] == LARGE
    assert table[1:3] == (SMALL, LARGE)
    assert table.layers.tolist() == [0, 0, 1, 0]
    assert table.frames.tolist() == [[1, 0, 0], [1, 0, 0], [1, 2, 1], [1, 0, 0]]
    assert table.bytes.tolist()[2] == [100, 200, 100]
    assert table.stored.tolist() == [1, 1, 3, 1]
    assert len(table.plain()) == 3 * 48
    with pytest.raises(IndexError):
        table[4]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([SMALL, LARGE]) | records, max_size=20))
def test_a_table_is_the_sequence_it_was_made_of(sequence):
    table = RecordTable(sequence)
    assert list(table) == sequence
    assert RecordTable.decode(table.encode()) == table
    assert hash(RecordTable(list(sequence))) == hash(table)
    columns = RecordTable.of_columns(
        table.layers, table.frames, table.bytes, table.stored, count=len(sequence)
    )
    assert columns == table
    assert RecordTable.of(table) is table


def test_a_million_equal_records_take_no_room():
    table = RecordTable.of_columns(3, (1, 0, 0), (4096, 0, 0), 1, count=1_000_000)
    assert len(table) == 1_000_000
    assert len(table.encode()) < 100
    assert table != RecordTable.of_columns(3, (1, 0, 0), (4096, 0, 0), 1, count=999_999)
    assert table != 3


def test_tables_that_are_none():
    good = RecordTable([SMALL, LARGE]).encode()
    run = RecordTable([SMALL]).plain()
    for data, reason in (
        (b"\x01", "1 bytes"),
        (good[:-3], "2 runs"),
        (struct.pack("<I", 1) + b"not zlib", "incorrect header"),
        (struct.pack("<I", 2) + zlib.compress(run), "2 runs in 48 bytes"),
        (struct.pack("<I", 1) + zlib.compress(run * 1000), "1 runs in 49 bytes"),
        (struct.pack("<I", 1) + zlib.compress(bytes(48)), "a run of no records"),
        (struct.pack("<I", 2) + zlib.compress((b"\xff" * 4 + run[4:]) * 2), "8589934590 records, more than"),
        (struct.pack("<I", 1) + zlib.compress(struct.pack("<I", 2**27 + 1) + run[4:]), "more than 134217728"),
    ):
        with pytest.raises(ValueError, match=reason):
            RecordTable.decode(data)
    many = struct.pack("<I", 1) + zlib.compress(struct.pack("<I", 2**27) + run[4:])
    assert len(RecordTable.decode(many)) == 2**27
    half = RecordTable.decode(many)
    half._runs["count"] += 1
    half._ends += 1
    with pytest.raises(ValueError, match="more than 134217728"):
        half.encode()
    assert RecordTable.decode(good).frames.dtype == np.uint32
