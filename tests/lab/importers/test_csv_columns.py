"""Columns by number and by name."""

import pytest

from tierstore.errors import DataError
from tierstore.lab.importing import SourceKind, import_trace

NAMED = b'time,"object id",bytes\n1,a,100\n2,"b,c",8192\n3,a,100\n'


def test_by_name(imported, packed):
    accesses, trace, keys = imported(
        packed(NAMED), SourceKind.CSV, key="object id", size="bytes", frame_bytes="4KiB"
    )
    assert [records for *_, records, _ in accesses] == [[0], [1], [0]]
    assert keys == ["a", "b,c"]
    assert trace.header.table.bytes[:, 0].tolist() == [100, 8192]
    assert trace.header.table.frames[:, 0].tolist() == [1, 2]


def test_by_number(imported):
    accesses, _, keys = imported(
        b"# made by hand\n9\tx\n9\ty\n", SourceKind.CSV, key="2", delimiter="tab", skip_lines=1
    )
    assert [records for *_, records, _ in accesses] == [[0], [1]]
    assert keys == ["x", "y"]


HEADED = b"timestamp,object_id,size\n1,A,10\n2,B,10\n3,A,10\n"


@pytest.mark.parametrize(
    ("data", "key", "header"),
    [
        (HEADED, 2, True),
        (HEADED.replace(b",", b"\t"), 2, True),
        (HEADED.replace(b"object_id", b" Object ID "), 2, True),
        (b"name,hits\nA,10\nB,10\nA,10\n", 1, True),  # no usual name, but above numbers
        (b",cache_key,size\n0,A,10\n1,B,10\n", 2, True),  # as pandas writes its index
        (b"obj\nA\nB\nA\n", 1, True),
        (b"time,size\n1,10\n2,10\n", 1, True),
        (b"A,10\nB,10\n", 1, False),
        (b"A,x\nB,y\n", 1, False),
        (b"A\n7\n8\nA\n", 1, False),  # a key is text or a number
        (b"A\n7\n8\n", 1, False),
        (b"id,x\nA,x\nid,x\n", 1, False),  # a header does not come again
        (b"1,id,2\n", 1, False),
    ],
)
def test_a_header_is_noticed(tmp_path, data, key, header):
    """Counted by hand: each key's records are the values below the header in the column that is the key."""
    (tmp_path / "source").write_bytes(data)
    found = import_trace(
        tmp_path / "source", tmp_path / "trace", kind=SourceKind.CSV, keys=tmp_path / "keys", options={}
    )
    rows = [line.replace("\t", ",").split(",") for line in data.decode().splitlines()]
    wanted = [row[key - 1] for row in rows[header:]]
    assert (found.requests, found.records) == (len(wanted), len(set(wanted)))
    assert (tmp_path / "keys").read_text().splitlines() == list(dict.fromkeys(wanted))
    assert found.columns["header"] == ("line 1" if header else "none")
    name = f" ({rows[0][key - 1].strip()})" if header else ""
    assert found.columns["key"] == f"column {key}{name}"


def test_what_is_not_read_is_said(tmp_path):
    (tmp_path / "source").write_bytes(HEADED)
    found = import_trace(tmp_path / "source", tmp_path / "trace")
    assert found.columns["size"] == "none (column 3 (size) is not read: --set size=3)"
    found = import_trace(tmp_path / "source", tmp_path / "trace", options={"size": "3"})
    assert (found.columns["size"], found.columns["time"], found.total_bytes) == (
        "column 3 (size)",
        "not read",
        20,
    )


def test_blanks_that_matter(imported):
    """Traces of webcachesim and LRB: time, key and size between blanks."""
    data = b"0 7 10\n1 8 100\n2 7 10\n"
    accesses, trace, keys = imported(data, SourceKind.CSV, key="2", size="3", delimiter=" ")
    assert ([records for *_, records, _ in accesses], keys) == ([[0], [1], [0]], ["7", "8"])
    assert trace.header.table.bytes[:, 0].tolist() == [10, 100]
    for spelled in ("tab", "\t", "\\t"):
        _, _, keys = imported(data.replace(b" ", b"\t"), SourceKind.CSV, key="2", delimiter=spelled)
        assert keys == ["7", "8"]
    for name in ("size", " size", " size "):
        _, trace, _ = imported(b"key , size\na,7\n", SourceKind.CSV, key="key", size=name)
        assert trace.header.table.bytes[:, 0].tolist() == [7]


#: Of each: whether it is a size, in a column of sizes.
NUMBERS = {
    **{"+7": 7, " 7": 7, "7 ": 7, "007": 7, "-0": 0, "0": 0, "\u0667": 7, str(2**62): 2**62},
    **dict.fromkeys(["7.0", "1e3", "0x7", "-1", "", " ", "x", "inf", "\u00b2", str(2**62 + 1), "9" * 5000]),
}


@pytest.mark.parametrize("text", NUMBERS)
def test_the_row_that_is_wrong_is_named(imported, text):
    """A number is a size or not, whether it stands alone or beside another row that is wrong."""
    if NUMBERS[text] is None:
        with pytest.raises(DataError, match="line 2: expected a size in bytes, found") as caught:
            imported(f"a,1\nb,{text}\nc,1\n".encode(), SourceKind.CSV, size="2")
        assert len(str(caught.value)) < 300
        return
    _, trace, _ = imported(f"a,1\nb,{text}\n".encode(), SourceKind.CSV, size="2")
    assert trace.header.table.bytes[:, 0].tolist() == [1, NUMBERS[text]]
    with pytest.raises(DataError, match="line 3: expected a size in bytes, found 'oops'"):
        imported(f"a,1\nb,{text}\nc,oops\n".encode(), SourceKind.CSV, size="2")


def test_objects_larger_than_frames_can_count(imported):
    data = b"a,5000000000\nb,3000000000\n" * 5
    _, trace, _ = imported(data, SourceKind.CSV, size="2", frame_bytes=2)
    assert trace.header.table.frames[:, 0].tolist() == [2_500_000_000, 1_500_000_000]
    _, trace, _ = imported(b"a,4294967295\n", SourceKind.CSV, size="2", frame_bytes=1)
    assert trace.header.table.frames[:, 0].tolist() == [4294967295]
