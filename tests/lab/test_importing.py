"""Which importer a source goes to, and that a target is whole or not there."""

import asyncio
import struct
import sys

import numpy as np
import pytest
from cases import npz, zstd
from refusals import refuses

from tierstore.config import dotted_fields
from tierstore.errors import CapabilityError, ConfigError, DataError
from tierstore.lab.importing import (
    SourceKind,
    detect_kind,
    import_trace,
    import_trace_async,
    options_of,
    write_trace,
)
from tierstore.trace.files import load_trace
from tierstore.trace.format import EventColumns, RecordTable
from tierstore.trace.replay import replay

SOURCES = {
    SourceKind.NPZ: npz(topk=np.zeros((2, 1, 1), np.uint8)),
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


@pytest.mark.parametrize("kind", SourceKind)
async def test_a_stream_is_imported_as_its_file_would_be(tmp_path, packed, kind):
    """In pieces of 5 bytes, while the loop goes on; nothing but the trace and the keys is left."""
    source = tmp_path / "upload"
    source.write_bytes(packed(SOURCES[kind]))
    wanted = import_trace(source, tmp_path / "wanted")
    turns = 0

    async def stream():
        nonlocal turns
        data = source.read_bytes()
        for first in range(0, len(data), 5):
            turns += 1
            await asyncio.sleep(0)
            yield data[first : first + 5]

    given = {"name": "upload", "keys": tmp_path / "keys", "kind": kind}
    assert await import_trace_async(stream(), tmp_path / "trace", **given) == wanted
    assert (tmp_path / "trace").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert turns == -(-source.stat().st_size // 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "trace", "upload", "wanted"]


async def test_a_stream_that_is_refused_or_ends_leaves_nothing(tmp_path):
    async def stream(*parts):
        for part in parts:
            if isinstance(part, Exception):
                raise part
            yield part

    with pytest.raises(DataError, match="upload: line 2"):
        await import_trace_async(stream(b"1\n", b"3 4\n"), tmp_path / "trace", name="upload")
    with pytest.raises(ConnectionResetError):
        await import_trace_async(stream(b"1\n", ConnectionResetError()), tmp_path / "trace")
    for name in ("", "..", "../upload", "/upload", "a/b"):
        with refuses(ConfigError, "name:", repr(name)):
            await import_trace_async(stream(b"1\n"), tmp_path / "trace", name=name)
    assert list(tmp_path.iterdir()) == []


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


MARK = b"\xef\xbb\xbf"
TEXTS = (SourceKind.VLLM, SourceKind.MEGATRON, SourceKind.CSV, SourceKind.TEXT)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_byte_order_mark_is_not_read(tmp_path, packed, kind):
    assert set(SourceKind) - set(TEXTS) == {SourceKind.NPZ, SourceKind.ORACLE_GENERAL}, "which are no text"
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    plain.write_bytes(SOURCES[kind])
    marked.write_bytes(packed(MARK + SOURCES[kind]))
    for chosen in (None, kind):
        found = import_trace(marked, tmp_path / "trace", kind=chosen, keys=tmp_path / "keys")
        assert found == import_trace(plain, tmp_path / "other", keys=tmp_path / "other-keys")
        assert (tmp_path / "keys").read_bytes() == (tmp_path / "other-keys").read_bytes()
    for encoding in ("utf-16", "utf-16-be", "utf-32", "utf-32-be"):
        marked.write_bytes(packed(("\ufeff" * encoding.endswith("be") + "a\nb\n").encode(encoding)))
        for chosen in (None, kind):
            with pytest.raises(DataError, match=r"UTF-16 or UTF-32, .*; expected UTF-8"):
                import_trace(marked, tmp_path / "trace", kind=chosen)


@pytest.mark.parametrize("kind", SourceKind)
def test_skippable_and_several_frames_of_zstd(tmp_path, kind):
    """As pzstd writes them; the format has 16 magic numbers for frames to skip."""
    data = SOURCES[kind]
    (tmp_path / "plain").write_bytes(data)
    wanted = import_trace(tmp_path / "plain", tmp_path / "trace").sha256
    for number in range(16):
        skip = struct.pack("<II", 0x184D2A50 + number, 5) + b"\0\1\2\3\4"
        parts = [skip, zstd.compress(data[:5]), skip, skip, zstd.compress(data[5:]), skip]
        (tmp_path / "packed").write_bytes(b"".join(parts))
        assert import_trace(tmp_path / "packed", tmp_path / "trace").sha256 == wanted


@pytest.mark.parametrize("kind", SourceKind)
def test_a_large_window_is_allowed_by_a_setting(tmp_path, kind):
    parameter = zstd.CompressionParameter
    packer = zstd.ZstdCompressor(options={parameter.window_log: 28, parameter.content_size_flag: 0})
    (tmp_path / "packed").write_bytes(packer.compress(SOURCES[kind]) + packer.flush())
    with pytest.raises(DataError, match=r"a zstd window above 2\^27 bytes: expected --set window_log=31"):
        import_trace(tmp_path / "packed", tmp_path / "trace")
    assert import_trace(tmp_path / "packed", tmp_path / "trace", options={"window_log": "28"}).kind is kind
    with pytest.raises(ConfigError, match="window_log: expected 10 to 31, got 32"):
        import_trace(tmp_path / "packed", tmp_path / "trace", options={"window_log": 32})


def test_one_line_a_key(tmp_path):
    source, names = tmp_path / "source.csv", tmp_path / "names"
    keys = ["a\nb", "a\\nb", "a\r\nb", "c", "a\u2028b", "\x85", "C:\\x"]
    source.write_text("".join(f'"{key}",1\n' for key in keys), newline="")
    found = import_trace(source, tmp_path / "trace", kind=SourceKind.CSV, keys=names)
    lines = names.read_text().splitlines()
    assert lines == [r"a\nb", r"a\\nb", r"a\r\nb", "c", r"a\u2028b", r"\x85", r"C:\\x"]
    assert [line.encode("latin-1").decode("unicode_escape") for line in lines] == keys
    assert found.records == len(keys)


def test_a_source_is_no_target(tmp_path):
    """Not even one that reads as a trace by its first bytes, nor by another name; nor do its keys replace it."""
    source, names = tmp_path / "source", {"again": "symlink_to", "hard": "hardlink_to"}
    source.write_text("tsrtrace\nb\ntsrtrace\n")
    for name, link in names.items():
        getattr(tmp_path / name, link)(source)
    for target in ("source", "again", "hard", f"../{tmp_path.name}/source"):
        with pytest.raises(ConfigError, match=r"the same file as .*source, which would be lost"):
            import_trace([source], tmp_path / target)
        with pytest.raises(ConfigError, match=r"the same file as .*source, which would be lost"):
            import_trace(source, tmp_path / "trace", keys=tmp_path / target)
    with pytest.raises(ConfigError, match=r"the same file as .*trace"):
        import_trace(source, tmp_path / "trace", keys=tmp_path / "trace")
    assert source.read_text() == "tsrtrace\nb\ntsrtrace\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "hard", "source"]


def test_zstd_without_a_package_that_reads_it(tmp_path, monkeypatch):
    for module in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "source").write_bytes(b"\x28\xb5\x2f\xfd and so on")
    with refuses(CapabilityError, "source: ", "backports.zstd", "pip install 'tierstore[zstd]'"):
        import_trace(tmp_path / "source", tmp_path / "trace")
