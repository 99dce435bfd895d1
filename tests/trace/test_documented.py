"""A parser written from docs/TRACES.md alone, with nothing of tierstore, reads every byte of a trace."""

import hashlib
import json
import struct
import zlib

import numpy as np
import pytest

from tierstore.trace.files import TraceWriter, load_trace
from tierstore.trace.format import Coding, TraceHeader, TraceRecord

COLUMNS = "BBHIIIIH"


def parse(data):
    magic, version, zero, description = struct.unpack_from("<8sIIQ", data)
    assert (magic, version, zero) == (b"tsrtrace", 2, 0)
    columns = [[] for _ in COLUMNS]
    at = 24
    while at < description:
        tag, events, units, size, crc, coding, constant, zero = struct.unpack_from("<4sIIIIBBH", data, at)
        payload = data[at + 24 : at + 24 + size]
        at += 24 + size
        assert (tag, zlib.crc32(payload), zero) == (b"CHNK", crc, 0)
        payload = zlib.decompress(payload) if coding == 1 else payload
        for number, kind in enumerate(COLUMNS):
            rows = units if number >= 6 else events
            stored = 1 if constant >> number & 1 else rows
            values = list(struct.unpack_from(f"<{stored}{kind}", payload))
            payload = payload[struct.calcsize(f"<{stored}{kind}") :]
            columns[number] += values * rows if stored != rows else values
        assert payload == b""
    tag, text, table, crc, events, units, sha256 = struct.unpack_from("<4sIIIQQ32s", data, at)
    assert (tag, zlib.crc32(data[at + 64 :]), len(data)) == (b"DESC", crc, at + 64 + text + table)
    settings = json.loads(data[at + 64 : at + 64 + text])
    (count,) = struct.unpack_from("<I", data, at + 64 + text)
    runs = zlib.decompress(data[at + 68 + text :])
    records = []
    for number in range(count):
        many, layer, *sizes, stored = struct.unpack_from("<II3I3QI", runs, 48 * number)
        records += [(layer, tuple(sizes[:3]), tuple(sizes[3:]), stored)] * many
    hashed = [runs] + [struct.pack(f"<{len(c)}{kind}", *c) for c, kind in zip(columns, COLUMNS, strict=True)]
    assert hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in hashed)).digest() == sha256
    assert (len(columns[0]), len(columns[6])) == (events, units)
    return settings, records, columns


@pytest.mark.parametrize("coding", Coding)
def test_a_documented_parser_reads_it(tmp_path, columns, coding):
    path = tmp_path / "trace"
    records = [TraceRecord(0, (1, 0, 0), (10, 0, 0), 1)] * 3 + [TraceRecord(7, (1, 2, 0), (10, 20, 0), 3)]
    header = TraceHeader(7, policy="lru", policy_options={"a": 1.5}, records=records, origin="a test")
    with TraceWriter(path, header, coding=coding) as writer:
        for part in columns.parts(1000):
            writer.extend(part)
    settings, found, (kinds, phases, layers, at, counts, steps, numbers, flags) = parse(path.read_bytes())
    trace = load_trace(path)
    assert settings == json.loads(header.to_json())
    assert found == [(r.layer, r.frames, r.bytes, r.stored) for r in records]
    for name, values in (
        ("kinds", kinds),
        ("phases", phases),
        ("layers", layers),
        ("at", at),
        ("counts", counts),
        ("steps", steps),
        ("records", numbers),
        ("flags", flags),
    ):
        np.testing.assert_array_equal(getattr(trace, name), values)
        np.testing.assert_array_equal(getattr(columns, name), values)
