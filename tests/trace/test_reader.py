"""Reading: what was written comes back; what is malformed is refused where it is wrong."""

import json
import struct
import zlib

import pytest

from tierstore.errors import DataError
from tierstore.lab.requests import load_requests
from tierstore.trace.files import load_trace, read_header, read_summary
from tierstore.trace.format import CHUNK, DESCRIPTION, PREAMBLE, TraceHeader, TraceKind
from tierstore.trace.replay import replay


def test_columns(small, header):
    trace = load_trace(small)
    assert trace.header == header
    assert len(trace) == 2
    assert trace.kinds.tolist() == [TraceKind.ACCESS, TraceKind.END_STEP]
    assert (trace.steps.tolist(), trace.phases.tolist(), trace.at.tolist()) == ([4, 4], [1, 0], [0, 0])
    assert (trace.offsets.tolist(), trace.records.tolist()) == ([0, 2, 2], [0, 2])
    assert trace.flags.tolist() == [1, 9]
    assert replay(small).misses == 2
    with small.open("rb") as file:
        summary = read_summary(file)
        assert file.tell() == PREAMBLE.size
    assert (summary.events, summary.units, summary.header) == (2, 2, header)
    with small.open("rb") as file:
        assert read_header(file) == header


def parts(data):
    """Where the chunk's payload starts, the description, and its parts."""
    start = struct.unpack_from("<Q", data, 16)[0]
    _, text, table, *_ = DESCRIPTION.unpack_from(data, start)
    return PREAMBLE.size + CHUNK.size, start, text, table


def test_malformed_files_are_refused_where_they_are_wrong(small, tmp_path):
    whole = small.read_bytes()
    payload, start, text, _ = parts(whole)
    chunk = PREAMBLE.size
    bad = tmp_path / "bad.trace"

    def refused(data, message):
        bad.write_bytes(data)
        for read in (load_trace, replay):
            with pytest.raises(DataError, match=message) as caught:
                read(bad)
            assert str(bad) in str(caught.value)

    def flipped(at):
        data = bytearray(whole)
        data[at] ^= 1
        return bytes(data)

    refused(b"", "byte 0: expected a trace")
    refused(b"PK\x03\x04" + whole[4:], "byte 0: expected a trace")
    refused(whole[:12], "byte 8: expected the rest of the preamble")
    refused(whole[:8] + b"\x01" + whole[9:], "byte 8: expected version 2 or 3 or 4 or 5 or 6 or 7, found 1")
    refused(whole[:8] + b"\x03" + whole[9:], "byte 8: expected version 2 .*, found 3")
    refused(whole[:16] + bytes(8) + whole[24:], "byte 16: .* not completed")
    refused(whole[:start], f"byte {start}: expected the description")
    refused(whole[: start + DESCRIPTION.size + text], "expected the table of records")
    refused(whole[: start + DESCRIPTION.size + 5], "expected the header")
    refused(flipped(start), f"byte {start}: expected the tag DESC")
    refused(flipped(start + DESCRIPTION.size), f"byte {start}: expected a description with its crc32")
    refused(flipped(len(whole) - 1), f"byte {start}: expected a description with its crc32")
    refused(whole + b"x", f"byte {len(whole)}: expected nothing after the description")
    refused(whole[:chunk] + b"JUNK" + whole[chunk + 4 :], f"byte {chunk}: expected the tag")
    refused(flipped(payload), f"byte {chunk}: expected a chunk with its crc32")
    refused(flipped(chunk + 4), f"byte {chunk}: expected a chunk of 3 events and 2 units, found")
    refused(whole[: chunk + 7] + b"\xff" + whole[chunk + 8 :], f"byte {chunk + 4}: expected at most")
    long = whole[: chunk + 12] + struct.pack("<I", 2**20) + whole[chunk + 16 :]
    refused(long, f"byte {payload}: expected a chunk of 2 events")


def test_events_that_are_not_those_described(small, tmp_path, header):
    whole, bad = small.read_bytes(), tmp_path / "bad.trace"
    _, start, _, _ = parts(whole)
    head = list(DESCRIPTION.unpack_from(whole, start))
    rest = whole[start + DESCRIPTION.size :]

    def refused(data, message):
        bad.write_bytes(data)
        for read in (load_trace, replay, load_requests):
            with pytest.raises(DataError, match=message) as caught:
                read(bad)
            assert str(bad) in str(caught.value)

    def with_head(**changed):
        values = [changed.get(str(place), value) for place, value in enumerate(head)]
        return whole[:start] + DESCRIPTION.pack(*values) + rest

    refused(with_head(**{"4": head[4] + 1}), f"byte {start}: expected 3 events and 2 units in all, found 2")
    refused(with_head(**{"5": head[5] - 1}), "expected 2 events and 1 units in all, found 2 and 2")
    refused(with_head(**{"6": bytes(32)}), "expected events with the sha256 0000")
    chunk = whole[PREAMBLE.size : start]
    moved = whole[:16] + struct.pack("<Q", start + len(chunk)) + whole[24:start] + chunk + whole[start:]
    refused(moved, "expected 2 events and 2 units in all, found 4 and 4")


def described(whole, text, table=None):
    """``whole`` with another description, its crc right."""
    _, start, text_bytes, _ = parts(whole)
    head = list(DESCRIPTION.unpack_from(whole, start))
    table = whole[start + DESCRIPTION.size + text_bytes :] if table is None else table
    head[1:4] = len(text), len(table), zlib.crc32(text + table)
    return whole[:start] + DESCRIPTION.pack(*head) + text + table


def test_descriptions_that_are_none(small, tmp_path):
    whole, bad = small.read_bytes(), tmp_path / "bad.trace"
    good = json.loads(TraceHeader(4).to_json())
    for text in ("[]", "{", "{}", json.dumps({**good, "colour": 1}), json.dumps({**good, "layer_quotas": 1})):
        bad.write_bytes(described(whole, text.encode()))
        with pytest.raises(DataError, match="expected a header, found malformed JSON"):
            load_trace(bad)
    bad.write_bytes(described(whole, json.dumps(good).encode(), b"\x01"))
    with pytest.raises(DataError, match="expected a table of records"):
        load_trace(bad)
