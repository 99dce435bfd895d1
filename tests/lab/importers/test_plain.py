"""Plain traces: one key a line, and oracleGeneral records."""

import io
import struct

import numpy as np
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.lab.importers import line_blocks
from tierstore.lab.importers.plain import stepped
from tierstore.lab.importing import SourceKind
from tierstore.trace.format import TraceKind


def test_keys_by_hand(imported, packed):
    accesses, trace, keys = imported(packed(b"7\nabc\n7\r\n 8 \n07"), SourceKind.TEXT, requests_per_step=2)
    assert [(step, records) for step, _, _, records, _ in accesses] == [
        (0, [0]),
        (0, [1]),
        (1, [0]),
        (1, [2]),
        (2, [3]),
    ]
    assert keys == ["7", "abc", "8", "07"]
    assert trace.kinds.tolist() == [0, 0, 10, 0, 0, 10, 0, 10]
    assert trace.steps.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert trace.header.capacity_frames == 4
    assert trace.header.table.bytes[:, 0].tolist() == [1, 1, 1, 1]


def test_a_line_can_be_left_out(imported):
    accesses, _, keys = imported(b"1\n*\n2\n*\n", SourceKind.TEXT, skip="*")
    assert [records for *_, records, _ in accesses] == [[0], [1]]
    assert keys == ["1", "2"]


def test_a_line_with_blanks_can_be_left_out(imported):
    for skip in ("# a comment", " # a comment "):
        _, _, keys = imported(b"# a comment\n1\n  # a comment\n2\n", SourceKind.TEXT, skip=skip)
        assert keys == ["1", "2"]


@settings(max_examples=share(50))
@given(st.lists(st.integers(0, 9), max_size=6), st.integers(1, 4))
def test_steps_do_not_depend_on_blocks(cuts, per_step):
    records = np.arange(sum(cuts), dtype=np.uint32)
    whole = stepped(records, 0, per_step)
    first, kinds, steps = 0, [], []
    for length in cuts:
        part = stepped(records[first : first + length], first, per_step)
        kinds += part.kinds.tolist()
        steps += part.steps.tolist()
        first += length
    assert kinds == whole.kinds.tolist()
    assert steps == whole.steps.tolist()
    # Request g belongs to step g // per_step, and a step's end comes after each per_step requests.
    asked = whole.kinds == TraceKind.ACCESS
    assert whole.steps[asked].tolist() == [number // per_step for number in range(len(records))]
    assert int((~asked).sum()) == len(records) // per_step


@given(st.binary(max_size=30).map(lambda data: data.translate(b"ab\r\n" * 64)), st.integers(1, 5))
def test_lines_do_not_depend_on_blocks(data, block_bytes):
    """Ended by \\n or \\r\\n, wherever a block ends; the last need not be ended."""
    found = [line for _, lines in line_blocks(io.BytesIO(data), block_bytes=block_bytes) for line in lines]
    lines = data.split(b"\n")
    wanted = [line.removesuffix(b"\r") for line in lines]
    assert found == (wanted if wanted[-1] else wanted[:-1])


def oracle(*rows):
    return b"".join(struct.pack("<IQIq", *row) for row in rows)


TRACE = oracle((1, 2**60, 5000, 2), (2, 7, 1, -1), (3, 2**60, 6000, -1))


def test_oracle_general_by_hand(imported, packed):
    accesses, trace, keys = imported(packed(TRACE), SourceKind.ORACLE_GENERAL)
    assert [records for *_, records, _ in accesses] == [[0], [1], [0]]
    assert keys == [str(2**60), "7"]
    assert trace.header.table.bytes[:, 0].tolist() == [5000, 1]  # the size of the first request
    assert trace.header.table.frames.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_oracle_general_sizes_in_frames(imported):
    _, trace, _ = imported(TRACE, SourceKind.ORACLE_GENERAL, frame_bytes="4KiB")
    assert trace.header.table.frames[:, 0].tolist() == [2, 1]
    assert trace.header.capacity_frames == 3
