"""What every importer refuses: the type of the error, and what it names (the line, byte, array, field or option)."""

import gzip
import io
import lzma
import struct
import zipfile

import numpy as np
import pytest
from cases import json_lines as lines
from cases import npz
from refusals import refuses

from tierstore.errors import ConfigError, DataError
from tierstore.lab.importing import SourceKind, detect_kind, import_trace

NAMED = b'time,"object id",bytes\n1,a,100\n2,"b,c",8192\n3,a,100\n'
LARGE = b"a,5000000000\nb,3000000000\n" * 5
BIG = f"a,{2**62}\n".encode()
CSV = [
    (NAMED, ("line 1: ", "'key'", "time, object id, bytes"), {"key": "key"}),
    (b"1,2\n3\n", ("line 2: ", "2 columns"), {"key": "2"}),
    (b"1,2\n3,\n", ("line 2: ", "key in column 2"), {"key": "2"}),
    (b"1,2\n3,x\n", ("line 2: ", "size", "'x'"), {"size": "2"}),
    (b"1,2\n3,-4\n", ("line 2: ", "size", "'-4'"), {"size": "2"}),
    (b"1,2\n3," + b"9" * 30 + b"\n", ("line 2: ", "size"), {"size": "2"}),
    (b'1,2\n"3,4\n', ("line 2: ",), {}),
    (LARGE, ("key 'a'", "5000000000", "frame_bytes", "got 1"), {"size": "2", "frame_bytes": 1}),
    (BIG * 2, ("sizes: ",), {"size": "2"}),
]
TEXT = [
    (b"1\n\n2\n", ("source: line 2: ", "empty"), {}),
    (b"1\n2\n3 4\n", ("source: line 3: ", "'3 4'"), {}),
    (b" \na b\n", ("source: line 1: ",), {}),
    (b"12\n1\r2\n", ("source: line 2: ", r"'1\r2'"), {}),  # which is not 12
    (b"1\r2\r3\r", ("source: line 1: ",), {}),  # nor is this one key, 123
    (b"1\n\x00\n", ("source: line 2: ",), {}),
    (b"# a comment\n1\n# another\n", ("source: line 3: ", "'# another'"), {"skip": "# a comment"}),
    (gzip.compress(b"1\n" * 1000, mtime=0)[:-9], ("source: ", "gzip"), {}),
    (b"\x28\xb5\x2f\xfd123", ("source: ", "zstd"), {}),
    (lzma.compress(b"1\n" * 1000)[:-9], ("source: ", "xz"), {}),
    (b"\xfd7zXZ\x00nothing", ("source: ", "xz"), {}),
    (b"", ("source ", "one request"), {}),
]
ORACLE_PAIR = struct.pack("<IQIqIQIq", 1, 2**60, 5000, 2, 2, 7, 1, -1)
ORACLE = [
    (ORACLE_PAIR[:-1], ("byte 24: ", "24 bytes", "23"), {}),
    (struct.pack("<IQIqIQIq", 1, 2**60, 5000, 2, 1, 1, 1, -9), ("byte 24: ", "-9"), {}),
]


GOOD = {"type": "route", "req_id": "r1", "token_idx": 0, "layer": 0, "topk_ids": [1]}
VLLM = [
    (lines(GOOD) + b"{oops\n", ("line 2: ", "column 2"), {}),
    (lines(GOOD) + b"\n" + lines(GOOD), ("line 2: ", "empty"), {}),
    (lines(GOOD, 3), ("line 2: ", "object", " 3"), {}),
    (lines({"type": "route"}), ("line 1: ", "layer"), {}),
    (lines({"type": "meta", "model_id": "a model"}), ("source: ", "routing"), {}),
    (lines(GOOD, {**GOOD, "layer": "three"}), ("line 2: layer: ", '"three"'), {}),
    (lines(GOOD, {**GOOD, "layer": -1}), ("line 2: layer: ", "-1"), {}),
    (lines(GOOD, {**GOOD, "topk_ids": "many"}), ("line 2: topk_ids: ",), {}),
    (lines(GOOD, {**GOOD, "topk_ids": [1, True]}), ("line 2: topk_ids: ",), {}),
    (lines(GOOD, {"layer": 1, "token_idx": 1}), ("line 2: ", "topk_ids"), {}),
    (lines(GOOD), ("line 1: ", "lap"), {"step": "lap"}),
    (lines({**GOOD, "req_id": [1]}), ("line 1: req_id: ",), {}),
    (lines({**GOOD, "phase": "sideways"}), ("line 1: phase: ", "forward"), {}),
]
WORDS = {"iteration": 1, "layer_number": 1, "tokens_per_expert": [1, "two"]}


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
    (b"junk", ("source: ", "npz"), {}),
    (archive("topk.npy", b"junk"), ("source: ",), {}),
    (npz(topk=np.array([{}], object)), ("source: ", "npz"), {}),
    (saved(TOPK), ("source: ", "npz", "single array"), {}),
    (npz(other=TOPK), ("array topk",), {}),
    (npz(topk=TOPK[0]), ("topk: ", "[tokens, layers, k]", "uint8 [2, 2]"), {}),
    (npz(topk=TOPK * 0.5), ("topk: ", "integers"), {}),
    (npz(topk=TOPK.astype(int) - 1), ("topk: token 0, layer 0: ",), {}),
    (npz(topk=TOPK, prompt_len=np.array([3])), ("prompt_len: ", "4 tokens", "3"), {}),
    (npz(topk=TOPK), ("topk: 4 tokens", "5"), {"regime": "train", "tokens_per_step": 5}),
    (npz(topk=TOPK), ("prompt_len: 1 ", "2 sequences"), {"sequences": 2}),
    (npz(topk=TOPK), ("topk: expert 3", "experts is 3"), {"experts": 3}),
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
    (SourceKind.MEGATRON, DataError, lines(WORDS), ("line 1: tokens_per_expert: ",), {}),
    *((SourceKind.NPZ, DataError, *row) for row in NPZ),
    *((SourceKind.CSV, ConfigError, b"1\n", (name,), options) for name, options in OPTIONS),
    (SourceKind.NPZ, ConfigError, npz(topk=TOPK), ("sequences: ",), {"sequences": 0}),
    (SourceKind.NPZ, ConfigError, npz(topk=TOPK), ("regime: ", "decode, train"), {"regime": "serve"}),
]


@pytest.mark.parametrize(("kind", "error", "data", "named", "options"), REFUSED)
def test_what_is_wrong_is_named(tmp_path, imported, kind, error, data, named, options):
    with refuses(error, *named) as caught:
        imported(data, kind, **options)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "target.trace").exists()


UNKNOWN = {"empty": b"", "binary": b"\x7fELF\0\0" * 9, "unknown: ": lines({"stage": 1})}


@pytest.mark.parametrize("named", UNKNOWN)
def test_what_is_like_nothing_known(tmp_path, named):
    (tmp_path / "unknown").write_bytes(UNKNOWN[named])
    with refuses(DataError, "unknown", named):
        detect_kind(tmp_path / "unknown")


# Several files of one log ------------------------------------------------------------------------------------


def batch(step, layer, *ids, **more):
    return {"req_id": None, "step": step, "layer": layer, "topk_ids": [list(ids)], **more}


OURS = lines(batch(1, 0, 1), batch(2, 0, 1))
BARE = b'{"type": "meta"}\n{"layer": 0, "topk_ids": [1]}\n'
#: Beside OURS.
OTHERS = [
    ([batch(1, 1, 0)], ("b: has 1 steps", "a has more")),
    ([batch(1, 1, 0), batch(2, 1, 0), batch(3, 1, 0)], ("a: has 2 steps", "b has more")),
    ([batch(1, 1, 0), batch(3, 1, 0)], ("b: line 2: ", "step 2", "a, found 3")),
    ([batch(1, 0, 0), batch(2, 1, 0)], ("b: layer 0", "a too")),
    ([batch(1, 1, 0), batch(2, 1, 0, req_id="r")], ("b: line 2: ", "tokens", "a, line 2")),
    ([batch(1, 1, 0), {"req_id": None, "step": 2}], ("b: line 2: layer: ", "null")),
]
SEVERAL = [
    *((SourceKind.VLLM, [("a", OURS), ("b", lines(*rows))], named) for rows, named in OTHERS),
    (None, [("a", BARE), ("c", b"12\n13\n")], ("c: ", "vllm", "a is", "text")),
    (None, [("c", b"12\n13\n")] * 2, ("c: ", "vllm", "megatron")),
    (None, [("a", BARE), ("b", BARE)], ("b: layer 0", "a too")),
]


@pytest.mark.parametrize(("kind", "sources", "named"), SEVERAL)
def test_files_of_no_common_log(tmp_path, kind, sources, named):
    for name, data in sources:
        (tmp_path / name).write_bytes(data)
    with refuses(DataError, *named):
        import_trace([tmp_path / name for name, _ in sources], tmp_path / "trace", kind=kind)
    assert not (tmp_path / "trace").exists()
