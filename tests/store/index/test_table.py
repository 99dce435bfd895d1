"""The table of a commit in columns, and that what a commit does is in proportion to what changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import KeyTable, NumberSet
from tierstore.errors import StoreFormatError
from tierstore.store.index.database import Index
from tierstore.store.index.live import LiveIndex, LiveRecord
from tierstore.store.index.table import Changed, CommittedRecords, GroupLocation, RecordEntry

u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)
locations = st.builds(
    GroupLocation, u16, u32, st.integers(0, 2**64 - 1), st.lists(u32, max_size=4).map(tuple)
)
entries = st.builds(
    RecordEntry, u16, u16, st.integers(-(2**63), 2**63 - 1), st.lists(locations, max_size=3).map(tuple)
)
commits = st.dictionaries(st.text(min_size=1, max_size=9), entries, max_size=12)


@given(commits, commits)
def test_a_table_is_the_mapping_that_it_was_made_of(
    first: dict[str, RecordEntry], second: dict[str, RecordEntry]
) -> None:
    packed = [(key.encode(), entry.pack()) for key, entry in first.items()]
    table = CommittedRecords.of(packed, where="here")
    assert table == first
    assert list(table.packed()) == [(key, entry.pack()) for key, entry in sorted(first.items())]
    for key in second:
        if key not in table:
            table.keys_by_number.add(key)
    kept = table.copy()
    table.update(second)
    assert table == first | second
    assert kept == first
    assert list(table) == sorted(first | second)
    assert "nothing of the kind" not in table


def test_changed_entries_are_merged() -> None:
    """Some of the records have new entries, and one is new; of two schemas, with other sections."""
    table = CommittedRecords.of([(b"a", _entry(0, 1).pack()), (b"b", _entry(1, 2).pack())], where="here")
    table.keys_by_number.add("c")
    changed = Changed(table.keys_by_number, np.array([1, 2]), [(2, 1), (1,)])
    for row, entry in zip(changed.rows, (_entry(1, 7), _entry(0, 8)), strict=True):
        row["schema"] = entry.schema
        row["shape"] = 1 - entry.schema
        crcs = [crc for location in entry.groups for crc in location.crcs]
        row["crcs"][: len(crcs)] = crcs
        for group, location in enumerate(entry.groups):
            row["slot"][group], row["generation"][group] = location.slot, location.generation
    assert dict(changed) == {"b": _entry(1, 7), "c": _entry(0, 8)}
    assert changed.packed() == [(key, entry.pack()) for key, entry in changed.items()]
    kept = table.copy()
    table.merge(changed)
    assert dict(table) == {"a": _entry(0, 1)} | dict(changed)
    assert dict(kept) == {"a": _entry(0, 1), "b": _entry(1, 2)}


def _entry(schema: int, slot: int) -> RecordEntry:
    groups = [GroupLocation(0, slot, 2, (3,)), GroupLocation(0, slot + 1, 4, (5, 6))]
    return RecordEntry(schema, 0, 0, tuple(groups[:1] if schema == 0 else groups[::-1]))


def test_an_entry_that_is_cut_short_is_named() -> None:
    whole = RecordEntry(0, 0, 0, (GroupLocation(0, 1, 2, (3,)),)).pack()
    with pytest.raises(StoreFormatError, match="here: record 'b': truncated index entry of 35 bytes"):
        CommittedRecords.of([(b"a", whole), (b"b", whole[:-1]), (b"c", whole)], where="here")


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "pop"]), st.integers(0, 70_000))))
def test_a_number_set_is_a_set(changes: list[tuple[str, int]]) -> None:
    numbers, expected = NumberSet(), set[int]()
    for change, number in changes:
        if change == "add":
            assert numbers.add(number) == (number not in expected)
            expected.add(number)
        elif change == "discard":
            assert numbers.discard(number) == (number in expected)
            expected.discard(number)
        elif expected:
            assert numbers.pop_first() == min(expected)
            expected.remove(min(expected))
        assert len(numbers) == len(expected)
        assert (number in numbers) == (number in expected)
    ordered = sorted(expected)
    assert numbers.array().tolist() == ordered
    assert numbers.smallest(2).tolist() == ordered[:2]
    assert numbers.largest(2).tolist() == ordered[-2:]
    numbers.difference_update(np.array(ordered[:1], np.uint32))
    assert numbers.array().tolist() == ordered[1:]


@given(st.lists(st.text(max_size=5), unique=True), st.integers(0, 5))
def test_a_key_table_numbers_keys(keys: list[str], removed: int) -> None:
    table = KeyTable()
    assert [table.add(key) for key in keys] == list(range(len(keys)))
    for _ in range(min(removed, len(keys))):
        table.pop()
    kept = keys[: len(keys) - min(removed, len(keys))]
    assert [table.find(key) for key in keys] == [*range(len(kept)), *[-1] * (len(keys) - len(kept))]
    assert table.ordered() == sorted(kept) == [kept[number] for number in table.sorted().tolist()]
    assert table.ordered(2) == sorted(kept[:2])
    for key in kept:
        with pytest.raises(ValueError, match="there already"):
            table.add(key)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of which a handle or an entry was made."""
    rows: list[int] = []
    make, entry = LiveRecord.__init__, CommittedRecords.entry

    def counted(self: LiveRecord, index: LiveIndex, row: int) -> None:
        rows.append(row)
        make(self, index, row)

    def read(self: CommittedRecords, number: int) -> RecordEntry:
        rows.append(number)
        return entry(self, number)

    monkeypatch.setattr(LiveRecord, "__init__", counted)
    monkeypatch.setattr(CommittedRecords, "entry", read)
    return rows


@pytest.mark.parametrize("count", [20, 200])
def test_a_commit_looks_at_what_changed(tmp_path: Path, looked_at: list[int], count: int) -> None:
    """As many entries of 200 records as of 20, three of them dirty."""
    with small_store(tmp_path / "store", count=count, numel=64, budget=1 << 20) as store:
        store.commit()
        store.update({f"e{number}": np.ones(64, np.float32) for number in (3, 5, 7)}, lr=0.1)
        looked_at.clear()
        store.commit()
        assert set(looked_at) == {store.core.record(f"e{number}").live.row for number in (3, 5, 7)}
        assert len(looked_at) <= 3 * 8
        looked_at.clear()
        store.commit()
        assert looked_at == []


def test_opening_makes_no_object_of_a_record(tmp_path: Path, looked_at: list[int]) -> None:
    small_store(tmp_path / "store", count=30, numel=64).close()
    index = Index(tmp_path / "store" / "index")
    looked_at.clear()
    assert len(index.read_commit().records) == 30
    assert looked_at == []
    index.close()


def test_checksums_of_entries_take_pairs_only() -> None:
    database, items = b"records", [(b"a", b"1"), (b"b", b"")]
    expected = sum(_native.crc32c(database + b"\0" + key + b"\0" + value, 0) for key, value in items)
    assert _native.entries_crc32c(database, items) == expected
    for wrong in ((b"a",), (), (b"a", b"1", b"2")):
        with pytest.raises(ValueError, match="expected pairs of a key and a value"):
            _native.entries_crc32c(database, [wrong])  # type: ignore[list-item]
