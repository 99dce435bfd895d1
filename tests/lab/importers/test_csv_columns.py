"""Columns by number and by name."""

from __future__ import annotations

import pytest

from tierstore.errors import ConfigError, DataError
from tierstore.lab.importing import SourceKind

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


def test_what_is_wrong_is_named(imported):
    def refused(data, message, error=DataError, **options):
        with pytest.raises(error, match=message):
            imported(data, SourceKind.CSV, **options)

    refused(NAMED, "line 1: expected a column 'key', found time, object id, bytes", key="key")
    refused(b"1,2\n3\n", "line 2: expected at least 2 columns, found 1", key="2")
    refused(b"1,2\n3,\n", "line 2: expected a key in column 2", key="2")
    refused(b"1,2\n3,x\n", "line 2: expected a size in bytes, found 'x'", size="2")
    refused(b"1,2\n3,-4\n", "line 2: expected a size in bytes, found '-4'", size="2")
    refused(b"1,2\n3," + b"9" * 30 + b"\n", "line 2: expected a size in bytes", size="2")
    refused(b'1,2\n"3,4\n', "line 2: unexpected end of data")
    refused(b"1\n", "delimiter: expected one character", ConfigError, delimiter="::")
    refused(b"1\n", "skip_lines", ConfigError, skip_lines=-1)
    refused(b"1\n", "requests_per_step: expected at least 1", ConfigError, requests_per_step=0)
    refused(b"1\n", "colour: unknown configuration key", ConfigError, colour=1)
