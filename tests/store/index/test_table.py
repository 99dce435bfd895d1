"""The table of a commit in columns, and that what a commit does is in proportion to what changed."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native
from tierstore._native import KeyTable, NumberSet
from tierstore.errors import StoreFormatError
from tierstore.store.format import MomentFormat, RecordSchema, Training, WeightFormat
from tierstore.store.index.database import Index
from tierstore.store.index.live import LiveIndex, LiveRecord
from tierstore.store.index.table import Changed, CommittedRecords, GroupLocation, RecordEntry

#: One group of one section; groups of one and two; of one and five.
SCHEMAS = [
    RecordSchema("frozen", 8, training=Training.FROZEN),
    RecordSchema("plain", 8),
    RecordSchema("narrow", 8, WeightFormat.SPLIT_BF16, moments=MomentFormat.INT8),
]
u16, u32 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1)


def sections(schema: RecordSchema) -> list[int]:
    return [len(schema.layout(group).sections) for group in schema.groups]


@st.composite
def entries(draw: st.DrawFn) -> RecordEntry:
    schema = draw(st.integers(0, len(SCHEMAS) - 1))
    groups = [
        GroupLocation(
            draw(u16), draw(u32), draw(st.integers(0, 2**64 - 1)), tuple(draw(u32) for _ in range(count))
        )
        for count in sections(SCHEMAS[schema])
    ]
    return RecordEntry(schema, draw(u16), draw(st.integers(-(2**63), 2**63 - 1)), tuple(groups))


commits = st.dictionaries(st.text(min_size=1, max_size=9), entries(), max_size=12)


def pack(entry: RecordEntry) -> bytes:
    """As docs/FORMAT.md says."""
    parts = [struct.pack("<HHHHq", entry.schema, entry.layer, len(entry.groups), 0, entry.step)]
    for place in entry.groups:
        parts.append(struct.pack("<HHIQ", place.directory, len(place.crcs), place.slot, place.generation))
        parts.append(struct.pack(f"<{len(place.crcs)}I", *place.crcs))
    return b"".join(parts)


def table_of(commit: dict[str, RecordEntry]) -> CommittedRecords:
    return CommittedRecords.of(
        SCHEMAS, [(key.encode(), pack(entry)) for key, entry in commit.items()], where="here"
    )


def changed_to(table: CommittedRecords, new: dict[str, RecordEntry]) -> Changed:
    """``new``, whose keys are added, as a commit has what changed."""
    for key in new:
        if table.keys_by_number.find(key) < 0:
            table.keys_by_number.add(key)
    numbers = {table.keys_by_number.find(key): entry for key, entry in new.items()}
    changed = Changed(table, np.array(sorted(numbers), np.int64))
    for row, number in zip(changed.rows, sorted(numbers), strict=True):
        entry = numbers[number]
        row["schema"], row["layer"], row["step"] = entry.schema, entry.layer, entry.step
        crcs = [crc for place in entry.groups for crc in place.crcs]
        row["crcs"][: len(crcs)] = crcs
        for group, place in enumerate(entry.groups):
            row["slot"][group], row["directory"][group] = place.slot, place.directory
            row["generation"][group] = place.generation
    return changed


@given(commits, commits)
def test_a_table_is_the_mapping_that_it_was_made_of(
    first: dict[str, RecordEntry], second: dict[str, RecordEntry]
) -> None:
    table = table_of(first)
    assert table == first
    assert list(table.packed()) == [(key, pack(entry)) for key, entry in sorted(first.items())]
    changed = changed_to(table, second)
    assert sorted(changed.packed()) == sorted((key, pack(entry)) for key, entry in second.items())
    kept = table.copy()
    table.merge(changed)
    assert table == first | second
    assert kept == first
    assert list(table) == sorted(first | second)
    assert "nothing of the kind" not in table


@pytest.mark.parametrize(
    ("schema", "damage", "message"),
    [
        (1, lambda whole: whole[:-1], "truncated index entry of 59 bytes, expected 60"),
        (1, lambda whole: whole + b"\0", "truncated index entry of 61 bytes, expected 60"),
        (1, lambda whole: whole[:9], "truncated index entry"),
        (1, lambda whole: b"", "truncated index entry"),
        (0, lambda whole: b"\x03" + whole[1:], "schema 3 is unknown"),
        (0, lambda whole: whole[:4] + b"\x02" + whole[5:], "does not match its schema"),
        (1, lambda whole: whole[:18] + b"\x02" + whole[19:], "does not match its schema"),
    ],
)
def test_an_entry_that_is_damaged_is_named(
    schema: int, damage: Callable[[bytes], bytes], message: str
) -> None:
    groups = [GroupLocation(0, 1, 2, tuple(range(count))) for count in sections(SCHEMAS[schema])]
    whole = pack(RecordEntry(schema, 0, 0, tuple(groups)))
    with pytest.raises(StoreFormatError, match=f"here: record 'b': {message}"):
        CommittedRecords.of(SCHEMAS, [(b"a", whole), (b"b", damage(whole)), (b"c", whole)], where="here")


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
        assert set(looked_at) == {store.core.record(f"e{number}").row for number in (3, 5, 7)}
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
