"""Writing: single events and columns give the same trace, which is whole or refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tierstore.trace.format import Coding, EventColumns, TraceHeader, TraceKind
from tierstore.trace.reader import load_trace, read_chunks, read_summary
from tierstore.trace.records import RecordTable
from tierstore.trace.writer import TraceWriter

NAMES = ("kinds", "phases", "layers", "at", "steps", "offsets", "records", "flags")


def summary(path):
    with path.open("rb") as file:
        return read_summary(file)


@pytest.mark.parametrize("coding", Coding)
def test_events_and_columns_give_the_same_trace(tmp_path, columns, coding):
    one, other = tmp_path / "one.trace", tmp_path / "other.trace"
    with TraceWriter(one, TraceHeader(4), coding=coding) as writer:
        writer.extend(columns)
    with TraceWriter(other, TraceHeader(4), coding=coding) as writer:
        for event in range(len(columns)):
            part = columns.part(event, event + 1)
            writer.event(
                TraceKind(int(part.kinds[0])),
                step=int(part.steps[0]),
                phase=int(part.phases[0]),
                layer=int(part.layers[0]),
                at=int(part.at[0]),
                records=part.records,
                flags=part.flags,
            )
    assert one.read_bytes() == other.read_bytes()
    trace = load_trace(one)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(trace, name), getattr(columns, name))


def test_the_hash_knows_no_chunks_and_no_settings(tmp_path, columns):
    whole, pieces, other = tmp_path / "whole", tmp_path / "pieces", tmp_path / "other"
    with TraceWriter(whole, TraceHeader(4)) as writer:
        writer.extend(columns)
    with TraceWriter(pieces, TraceHeader(99, policy="lru", origin="pieces"), coding=Coding.PLAIN) as writer:
        for part in columns.parts(100):
            writer.extend(part)
    with TraceWriter(other, TraceHeader(4)) as writer:
        writer.extend(columns.part(1, len(columns)))
    assert summary(whole).sha256 == summary(pieces).sha256 != summary(other).sha256
    assert (summary(whole).events, summary(whole).units) == (len(columns), len(columns.records))


def test_records_may_become_known_while_writing(tmp_path):
    path = tmp_path / "trace"
    with TraceWriter(path, TraceHeader(0)) as writer:
        writer.extend(EventColumns.build([1, 1], [0, 1]))
        table = RecordTable.of_columns(0, (1, 0, 0), (10, 0, 0), 1, count=2)
        writer.header = replace(writer.header, capacity_frames=2, records=table)
    assert load_trace(path).header.table == table


def test_long_traces_are_several_chunks(tmp_path, header):
    path = tmp_path / "long.trace"
    events = EventColumns.build(np.ones(200_000), np.arange(200_000) % 3)
    with TraceWriter(path, header) as writer:
        writer.extend(events)
        writer.event(TraceKind.END_STEP)
    with path.open("rb") as file:
        sizes = [len(chunk) for chunk in read_chunks(file, read_summary(file))]
    assert sizes == [65536, 65536, 65536, 200_000 - 3 * 65536, 1]
    assert path.stat().st_size < 20_000  # a period of three compresses well


def test_a_writer_that_failed_leaves_no_trace(tmp_path, header):
    path = tmp_path / "failed.trace"

    def fail():
        with TraceWriter(path, header) as writer:
            writer.event(TraceKind.END_STEP)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert list(tmp_path.iterdir()) == []
    with TraceWriter(path, header) as writer, pytest.raises(ValueError, match="layer 65536"):
        writer.extend(EventColumns.build([1], [0], layers=65536))
