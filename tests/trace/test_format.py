"""Records, events, chunks and headers as bytes and back; the shares of layers."""

import hashlib
import itertools
import json
import struct
import zlib

import numpy as np
import pytest
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.trace.format import (
    CHUNK,
    Coding,
    EventColumns,
    EventDigest,
    RecordTable,
    TraceHeader,
    TraceKind,
    TraceRecord,
    decode_chunk,
    encode_chunk,
)
from tierstore.trace.replay import quotas_by_layer

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


@settings(max_examples=share(50))
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
        (good[:-3], "another length"),
        (struct.pack("<I", 1) + b"not zlib", "incorrect header"),
        (struct.pack("<I", 2) + zlib.compress(run), "2 runs in 48 bytes"),
        (struct.pack("<I", 1) + zlib.compress(run * 1000), "another length"),
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


NAMES = ("kinds", "phases", "layers", "at", "steps", "offsets", "records", "flags")


def same(one, other):
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in NAMES)


def test_columns_from_single_values():
    columns = EventColumns.build([2, 0, 1], [5, 6, 7], kinds=[0, 10, 0], steps=3)
    assert columns.offsets.tolist() == [0, 2, 2, 3]
    assert columns.counts.tolist() == [2, 0, 1]
    assert columns.steps.tolist() == [3, 3, 3]
    assert columns.flags.tolist() == [1, 1, 1]
    assert [column.dtype for column in (columns.kinds, columns.layers, columns.flags)] == [
        np.uint8,
        np.uint32,
        np.uint16,
    ]
    with pytest.raises(ValueError, match="2 units in all, but 3 records"):
        EventColumns.build([2], [1, 2, 3])
    with pytest.raises(ValueError, match="a column of 1 values"):
        EventColumns.build([2], [1, 2], steps=[1, 2])


@settings(max_examples=share(60))
@given(counts=st.lists(st.integers(0, 6), max_size=30), limit=st.integers(1, 12))
def test_parts_are_the_whole(counts, limit):
    columns = EventColumns.build(counts, np.arange(sum(counts)), steps=np.arange(len(counts)))
    parts = list(columns.parts(limit))
    assert all(len(part) <= limit and (len(part.records) <= limit or len(part) == 1) for part in parts)
    assert same(EventColumns.joined(parts), columns)
    for one, following in itertools.pairwise(parts):  # none could have held another event
        assert len(one) == limit or len(one.records) + int(following.counts[0]) > limit


def test_the_hash_is_the_documented_one(columns):
    table = RecordTable([TraceRecord(0, (1, 0, 0), (10, 0, 0), 1)] * 4)
    digest = EventDigest()
    for part in columns.parts(100):
        digest.update(part)
    run = (4).to_bytes(4, "little") + b"".join(n.to_bytes(4, "little") for n in (0, 1, 0, 0))
    run += b"".join(n.to_bytes(8, "little") for n in (10, 0, 0)) + (1).to_bytes(4, "little")
    stored = [
        run,
        columns.kinds.tobytes(),
        columns.phases.tobytes(),
        columns.layers.astype("<u2").tobytes(),
        columns.at.tobytes(),
        columns.counts.astype("<u4").tobytes(),
        columns.steps.tobytes(),
        columns.records.tobytes(),
        columns.flags.tobytes(),
    ]
    expected = hashlib.sha256(b"".join(hashlib.sha256(column).digest() for column in stored))
    assert digest.digest(table) == expected.digest()
    assert (digest.events, digest.units) == (len(columns), len(columns.records))


@pytest.mark.parametrize("coding", Coding)
def test_a_chunk_comes_back(columns, coding):
    data = encode_chunk(columns, coding)
    tag, events, units, size, crc, stored_coding, constant, zero = CHUNK.unpack_from(data)
    payload = data[CHUNK.size :]
    assert (tag, events, units, zero) == (b"CHNK", len(columns), len(columns.records), 0)
    assert (size, crc, stored_coding, constant) == (len(payload), zlib.crc32(payload), coding, 0)
    back = decode_chunk(payload, events=events, units=units, coding=coding, constant=constant)
    assert same(back, columns)


def test_constant_columns_are_one_value():
    accesses = EventColumns.build(np.ones(1000), np.arange(1000))
    data = encode_chunk(accesses, Coding.PLAIN)
    constant = CHUNK.unpack_from(data)[6]
    assert constant == 0b1011_1111
    assert len(data) == CHUNK.size + 1 + 1 + 2 + 4 + 4 + 4 + 4 * 1000 + 2
    payload = data[CHUNK.size :]
    back = decode_chunk(payload, events=1000, units=1000, coding=0, constant=constant)
    assert same(back, accesses)


def test_payloads_that_are_none():
    good = encode_chunk(EventColumns.build([1, 1], [3, 4], kinds=[0, 10]), Coding.ZLIB)
    _, events, units, _, _, coding, constant, _ = CHUNK.unpack_from(good)
    payload = good[CHUNK.size :]

    def refused(payload, message, *, coding=coding, events=events, units=units):
        with pytest.raises(ValueError, match=message):
            decode_chunk(payload, events=events, units=units, coding=coding, constant=constant)

    refused(payload, "coding 2", coding=2)
    refused(payload, "bytes of columns", coding=0)
    refused(payload[:-1], "of another length")
    refused(payload + b"x", "of another length")
    refused(b"junk", "header")
    refused(payload, "bytes of columns", events=1)
    refused(payload, "bytes of columns", units=7)
    plain = bytearray(zlib.decompress(payload))
    plain[1] = 14
    refused(bytes(plain), "kind 14", coding=0)
    plain[1] = 10
    plain[2 + 1 + 2 + 4] = 9  # units of each event (a constant column)
    refused(bytes(plain), "18 units in all", coding=0)


def test_a_header_is_its_json():
    header = TraceHeader(
        9, scope="layer", layer_quotas=(4, 5), policy_options={"half_life": 2.0}, origin="a test"
    )
    assert TraceHeader.from_json(header.to_json(), header.table) == header
    assert "records" not in header.to_json()
    assert TraceHeader(9, records=[TraceRecord(0, (1, 0, 0), (1, 0, 0), 1)] * 2).table == RecordTable(
        [TraceRecord(0, (1, 0, 0), (1, 0, 0), 1)] * 2
    )
    assert max(TraceKind) == TraceKind.RELEASE
    assert (header.version, "late_records" in header.to_json()) == (2, False)
    records = [TraceRecord(0, (1, 0, 0), (1, 0, 0), 1)] * 2
    late = TraceHeader(9, records=records, late_records=2)
    assert late.version == 3
    assert TraceHeader.from_json(late.to_json(), late.table) == late
    with pytest.raises(ValueError, match="late_records 3 of 2"):
        TraceHeader(9, records=records, late_records=3)


def test_a_header_says_how_accesses_were_split():
    header = TraceHeader(9, group_order="key")
    assert TraceHeader.from_json(header.to_json(), header.table) == header
    # Before there was a choice, all were split in key order, and replay so.
    older = json.loads(TraceHeader(9).to_json())
    del older["group_order"]
    assert TraceHeader.from_json(json.dumps(older), header.table) == header
    with pytest.raises(ValueError, match="group_order 'any': expected resident-first, key or given"):
        TraceHeader.from_json(json.dumps(older | {"group_order": "any"}), header.table)


def test_quotas_by_hand() -> None:
    assert quotas_by_layer([1, 3], 9) == [0, 5, 0, 4]
    assert quotas_by_layer([1, 3], 9, [1.0, 2.0]) == [0, 3, 0, 6]
    # 9 * 0.35 = 3.15 and 9 * 0.65 = 5.85: the frame that is left over goes to the first.
    assert quotas_by_layer([3, 1], 9, [0.35, 0.65]) == [0, 4, 0, 5]
    # Shares that were rounded still give back the frames that they came from.
    assert quotas_by_layer([0, 1, 2], 9, [0.333333333, 0.555555556, 0.111111111]) == [3, 5, 1]


def test_quotas_are_never_more_than_the_capacity() -> None:
    # Every part lies a hundredth of a frame below a whole one.
    for shares in ([], [1.0] * 128):
        quotas = quotas_by_layer(range(128), 128 * 10**5 - 1, shares)
        assert (min(quotas), max(quotas), sum(quotas)) == (10**5 - 1, 10**5, 128 * 10**5 - 1)
