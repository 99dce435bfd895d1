"""Which importer a source goes to, and that a target is whole or not there."""

from __future__ import annotations

import io
import struct
import sys

import numpy as np
import pytest

from tierstore.config import dotted_fields
from tierstore.errors import CapabilityError, DataError
from tierstore.lab.importing import SourceKind, detect_kind, import_trace, options_of, write_trace
from tierstore.trace.format import EventColumns
from tierstore.trace.reader import load_trace
from tierstore.trace.records import RecordTable
from tierstore.trace.replay import replay


def npz():
    file = io.BytesIO()
    np.savez(file, topk=np.zeros((2, 1, 1), np.uint8))
    return file.getvalue()


SOURCES = {
    SourceKind.NPZ: npz(),
    SourceKind.VLLM: b'{"type": "meta"}\n{"layer": 0, "topk_ids": [1]}\n',
    SourceKind.MEGATRON: b'{"iteration": 1, "layer_number": 1, "topk_indices": [[0]]}\n',
    SourceKind.ORACLE_GENERAL: struct.pack("<IQIq", 1, 2, 3, -1),
    SourceKind.CSV: b"a,1\nb,2\n",
    SourceKind.TEXT: b"12\n13\n",
}


@pytest.mark.parametrize("kind", SourceKind)
def test_every_kind_is_known_by_its_bytes(tmp_path, packed, kind):
    source = tmp_path / "no-telling-name"
    source.write_bytes(packed(SOURCES[kind]))
    assert detect_kind(source) is kind
    summary = import_trace(source, tmp_path / "trace")
    assert summary.kind is kind
    assert summary.records == len(load_trace(tmp_path / "trace").header.records)
    assert replay(tmp_path / "trace").evictions == 0  # everything fits, as the header says
    assert all(info.help for info in dotted_fields(options_of(kind)))


def test_what_is_like_nothing_known(tmp_path):
    source = tmp_path / "source"
    for data, message in ((b"", "an empty file"), (b"\x7fELF\0\0" * 9, "a binary file of no known kind")):
        source.write_bytes(data)
        with pytest.raises(DataError, match=message):
            detect_kind(source)


def test_a_target_is_whole_or_as_it_was(tmp_path):
    source, target = tmp_path / "source", tmp_path / "trace"
    target.write_bytes(b"tsrtrace, what was there")
    source.write_bytes(b"1\n2\n3 4\n")
    with pytest.raises(DataError, match="line 3"):
        import_trace(source, target, kind=SourceKind.TEXT)
    assert target.read_bytes() == b"tsrtrace, what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "trace"]


def test_writing_events(tmp_path):
    table = RecordTable.of_columns(0, (2, 0, 0), (8, 0, 0), 1, count=3)
    write_trace(tmp_path / "trace", table, iter([EventColumns.build([3], [0, 1, 2])] * 2), origin="a test")
    trace = load_trace(tmp_path / "trace")
    assert (len(trace), trace.header.capacity_frames, trace.header.origin) == (2, 6, "a test")


def test_sizes_that_change_are_counted(tmp_path):
    source = tmp_path / "sized.csv"
    source.write_text("key,size\na,10\nb,5\na,10\na,11\nb,6\n")
    found = import_trace(source, tmp_path / "sized.trace", options={"key": "key", "size": "size"})
    assert (found.resized, found.total_bytes) == (2, 15)
    (tmp_path / "keys.txt").write_text("a\nb\na\n")
    assert import_trace(tmp_path / "keys.txt", tmp_path / "keys.trace").resized == 0


def test_zstd_without_a_package_that_reads_it(tmp_path, monkeypatch):
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "source").write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with pytest.raises(
        CapabilityError, match=r"source: .* needs backports.zstd: pip install 'tierstore\[zstd\]'"
    ):
        import_trace(tmp_path / "source", tmp_path / "trace")


def test_several_sources_are_of_one_routing_log(tmp_path):
    for name, kind in (("a", SourceKind.VLLM), ("b", SourceKind.VLLM), ("c", SourceKind.TEXT)):
        (tmp_path / name).write_bytes(SOURCES[kind])
    text, log = tmp_path / "c", tmp_path / "a"
    with pytest.raises(DataError, match=r"c: expected vllm, as .*a is, found text"):
        import_trace([log, text], tmp_path / "trace")
    with pytest.raises(
        DataError, match=r"c: several sources are the layers of a routing log \(vllm or megatron\)"
    ):
        import_trace([text, text], tmp_path / "trace")
    with pytest.raises(DataError, match=r"b: layer 0, which is in .*a too"):
        import_trace([log, tmp_path / "b"], tmp_path / "trace")
    assert not (tmp_path / "trace").exists()
