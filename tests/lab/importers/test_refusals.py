"""What every importer refuses: the type of the error, and what it names (the line, byte, array, field or option)."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import re
import struct
import zipfile

import numpy as np
import pytest

from tierstore.errors import ConfigError, DataError
from tierstore.lab.importing import SourceKind, detect_kind

NAMED = b'time,"object id",bytes\n1,a,100\n2,"b,c",8192\n3,a,100\n'
LARGE = b"a,5000000000\nb,3000000000\n" * 5
BIG = f"a,{2**62}\n".encode()
CSV = [
    (NAMED, "line 1: .*'key'.* time, object id, bytes", {"key": "key"}),
    (b"1,2\n3\n", "line 2: .*2 columns", {"key": "2"}),
    (b"1,2\n3,\n", "line 2: .*key in column 2", {"key": "2"}),
    (b"1,2\n3,x\n", "line 2: .*size.*'x'", {"size": "2"}),
    (b"1,2\n3,-4\n", "line 2: .*size.*'-4'", {"size": "2"}),
    (b"1,2\n3," + b"9" * 30 + b"\n", "line 2: .*size", {"size": "2"}),
    (b'1,2\n"3,4\n', "line 2: ", {}),
    (
        LARGE,
        "key 'a' of 5000000000 bytes: .*frame_bytes of at least 2, got 1",
        {"size": "2", "frame_bytes": 1},
    ),
    (BIG * 2, "sizes: ", {"size": "2"}),
]
TEXT = [
    (b"1\n\n2\n", "source: line 2: .*empty line", {}),
    (b"1\n2\n3 4\n", "source: line 3: .*'3 4'", {}),
    (b" \na b\n", "source: line 1: ", {}),
    (b"12\n1\r2\n", r"source: line 2: .*'1\\r2'", {}),  # which is not 12
    (b"1\r2\r3\r", "source: line 1: ", {}),  # nor is this one key, 123
    (b"1\n\x00\n", "source: line 2: ", {}),
    (b"# a comment\n1\n# another\n", "source: line 3: .*'# another'", {"skip": "# a comment"}),
    (gzip.compress(b"1\n" * 1000, mtime=0)[:-9], "source: damaged gzip", {}),
    (b"\x28\xb5\x2f\xfd123", "source: damaged zstd", {}),
    (lzma.compress(b"1\n" * 1000)[:-9], "source: damaged xz", {}),
    (b"\xfd7zXZ\x00nothing", "source: damaged xz", {}),
    (b"", "source .*at least one request", {}),
]
ORACLE = [
    (struct.pack("<IQIqIQIq", 1, 2**60, 5000, 2, 2, 7, 1, -1)[:-1], "byte 24: .*24 bytes, found 23", {}),
    (struct.pack("<IQIqIQIq", 1, 2**60, 5000, 2, 1, 1, 1, -9), "byte 24: .*-9", {}),
]


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


GOOD = {"type": "route", "req_id": "r1", "token_idx": 0, "layer": 0, "topk_ids": [1]}
VLLM = [
    (lines(GOOD) + b"{oops\n", "line 2: .*column 2", {}),
    (lines(GOOD) + b"\n" + lines(GOOD), "line 2: .*empty line", {}),
    (lines(GOOD, 3), "line 2: .*object.* 3", {}),
    (lines({"type": "route"}), "line 1: .*fields layer", {}),
    (lines({"type": "meta", "model_id": "a model"}), "source: .*routing", {}),
    (lines(GOOD, {**GOOD, "layer": "three"}), 'line 2: layer: .*"three"', {}),
    (lines(GOOD, {**GOOD, "layer": -1}), "line 2: layer: .*-1", {}),
    (lines(GOOD, {**GOOD, "topk_ids": "many"}), "line 2: topk_ids: ", {}),
    (lines(GOOD, {**GOOD, "topk_ids": [1, True]}), "line 2: topk_ids: ", {}),
    (lines(GOOD, {"layer": 1, "token_idx": 1}), "line 2: .*field topk_ids", {}),
    (lines(GOOD), "line 1: .*field lap", {"step": "lap"}),
    (lines({**GOOD, "req_id": [1]}), "line 1: req_id: ", {}),
    (lines({**GOOD, "phase": "sideways"}), "line 1: phase: .*forward", {}),
]
MEGATRON = [
    (
        lines({"iteration": 1, "layer_number": 1, "tokens_per_expert": [1, "two"]}),
        "line 1: tokens_per_expert: ",
        {},
    ),
]


def npz(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def archive(name, data):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr(name, data)
    return file.getvalue()


TOPK = np.array([[[0, 1], [3, 2]], [[1, 2], [2, 3]], [[0, 3], [0, 1]], [[2, 0], [1, 3]]], np.uint8)
NPZ = [
    (b"junk", "source: .*npz", {}),
    (archive("topk.npy", b"junk"), "source: .*(npz|integers)", {}),
    (npz(topk=np.array([{}], object)), "source: .*npz", {}),
    (saved(TOPK), "source: .*npz.*single array", {}),
    (npz(other=TOPK), "array topk", {}),
    (npz(topk=TOPK[0]), r"topk: .*\[tokens, layers, k\], found uint8 \[2, 2\]", {}),
    (npz(topk=TOPK * 0.5), "topk: .*integers", {}),
    (npz(topk=TOPK.astype(int) - 1), "topk: token 0, layer 0: ", {}),
    (npz(topk=TOPK, prompt_len=np.array([3])), "prompt_len: .*4 tokens, .*sum 3", {}),
    (npz(topk=TOPK), "topk: 4 tokens .*5", {"regime": "train", "tokens_per_step": 5}),
    (npz(topk=TOPK), "prompt_len: 1 .*2 sequences", {"sequences": 2}),
    (npz(topk=TOPK), "topk: expert 3, .*experts is 3", {"experts": 3}),
]
#: Options that no source makes right.
OPTIONS = [
    *(("delimiter: ", {"delimiter": text}) for text in ("::", "", '"', "\n", "\0")),
    *(("skip_lines", {"skip_lines": wrong}) for wrong in (-1, 2**63, "9" * 5000)),
    *(("requests_per_step", {"requests_per_step": wrong}) for wrong in (0, -1, 2**63, "9" * 5000)),
    ("colour: ", {"colour": 1}),
]
REFUSED = [
    *((SourceKind.CSV, DataError, *row) for row in CSV),
    *((SourceKind.TEXT, DataError, *row) for row in TEXT),
    *((SourceKind.ORACLE_GENERAL, DataError, *row) for row in ORACLE),
    *((SourceKind.VLLM, DataError, *row) for row in VLLM),
    *((SourceKind.MEGATRON, DataError, *row) for row in MEGATRON),
    *((SourceKind.NPZ, DataError, *row) for row in NPZ),
    *((SourceKind.CSV, ConfigError, b"1\n", *row) for row in OPTIONS),
    (SourceKind.NPZ, ConfigError, npz(topk=TOPK), "sequences: ", {"sequences": 0}),
    (SourceKind.NPZ, ConfigError, npz(topk=TOPK), "regime: .*decode, train", {"regime": "serve"}),
]


@pytest.mark.parametrize(("kind", "error", "data", "named", "options"), REFUSED)
def test_what_is_wrong_is_named(tmp_path, imported, kind, error, data, named, options):
    with pytest.raises(error, match=named) as caught:
        imported(data, kind, **options)
    assert len(str(caught.value)) < 300
    assert not re.search(r"\n", str(caught.value))
    assert not (tmp_path / "target.trace").exists()


def test_json_of_no_known_log(tmp_path):
    (tmp_path / "unknown").write_bytes(lines({"stage": 1}))
    with pytest.raises(DataError, match="unknown: "):
        detect_kind(tmp_path / "unknown")
