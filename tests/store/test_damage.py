"""Damage on disk is found, and named; a store that is not what it says is refused."""

import contextlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest_store import flip_bit, small_store

from tierstore.errors import (
    BudgetError,
    ChecksumError,
    ConfigError,
    StoreExistsError,
    StoreFormatError,
    StoreMissingError,
)
from tierstore.store import (
    AdamWConfig,
    CacheConfig,
    Group,
    Inactive,
    ParameterStore,
    RecordSchema,
    Scope,
    StoreConfig,
    WeightFormat,
    verify_store,
)
from tierstore.store.index.database import Commit, Index
from tierstore.store.index.table import CommittedRecords

CONFIG = StoreConfig(host_budget=1 << 18)
SECTIONS = {
    WeightFormat.FP32: {"weight": "weights", "exp_avg": "moments", "exp_avg_sq": "moments"},
    WeightFormat.SPLIT_BF16: {
        "weight_hi": "weights",
        "weight_lo": "moments",
        "exp_avg": "moments",
        "exp_avg_sq": "moments",
    },
}


def flip(path: Path, schema: RecordSchema, group: Group, slot: int, section: str, bit: int) -> None:
    layout = schema.layout(group)
    offset = slot * layout.slot_bytes
    for part in layout.sections:
        if part.name == section:
            break
        offset += part.padded_nbytes
    flip_bit(path, 8 * offset + bit)


@pytest.mark.parametrize(
    ("weight_format", "section"), [(f, section) for f, names in SECTIONS.items() for section in names]
)
@pytest.mark.parametrize("end", ["first", "last"])
def test_one_flipped_bit(tmp_path: Path, weight_format: WeightFormat, section: str, end: str) -> None:
    with small_store(tmp_path / "store", numel=1100, weight_format=weight_format) as store:
        schema = store.info("e2").schema
        group = Group[SECTIONS[weight_format][section].upper()]
        slot = store.core.record("e2").slot(group)
        part = next(s for s in schema.layout(group).sections if s.name == section)
    extent = slot.extent.path
    assert extent == tmp_path / "store" / "extents" / f"expert.{group.label}"
    flip(extent, schema, group, slot.number, section, 0 if end == "first" else 8 * part.nbytes - 1)
    (failure,) = verify_store(tmp_path / "store").failures
    assert all(word in failure for word in ("'e2'", f"section {section},", str(extent)))
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        with pytest.raises(ChecksumError) as caught:
            store.fetch(["e2"], [group])
        assert all(word in str(caught.value) for word in ("'e2'", f"section {section},", str(extent)))
        with pytest.raises(ChecksumError, match=section):
            store.records_crc32c()
        # The other records, and the other group of this one, are as good as ever.
        with store.fetch(["e0", "e1", "e3"], [Group.WEIGHTS, Group.MOMENTS]):
            pass
        other = Group.MOMENTS if group is Group.WEIGHTS else Group.WEIGHTS
        with store.fetch(["e2"], [other]):
            pass
        # What depends on it is never committed.
        store.update({"e2": np.ones(1100, np.float32)}, lr=0.1)
        with pytest.raises(ChecksumError, match=section):
            store.commit()


def test_damage_in_a_snapshot_is_found(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", retain=1) as store:
        schema, slot = store.info("e1").schema, store.core.record("e1").slot(Group.WEIGHTS)
        store.commit(snapshot="old")
        store.update({"e1": np.ones(3000, np.float32)}, lr=0.1)
        store.commit()
        flip(tmp_path / "store/extents/expert.weights", schema, Group.WEIGHTS, slot.number, "weight", 5)
        (failure,) = store.verify().failures
        assert "snapshot 'old': record 'e1'" in failure
        with store.fetch(["e1"]):
            pass


@pytest.mark.parametrize("size", [0, 12288 * 4 - 1, 12288])
def test_truncated_extents_are_refused(tmp_path: Path, size: int) -> None:
    small_store(tmp_path / "store").close()
    extent = tmp_path / "store" / "extents" / "expert.weights"
    with open(extent, "r+b") as file:
        file.truncate(size)
    with pytest.raises(StoreFormatError, match=rf"{extent}: truncated.*'e\d'"):
        verify_store(tmp_path / "store")
    extent.unlink()
    with pytest.raises(StoreFormatError, match=f"{extent}: the extent file is missing"):
        verify_store(tmp_path / "store")
    assert not extent.exists()


def test_damaged_index_is_refused(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    data = tmp_path / "store" / "index" / "data.mdb"
    whole = data.read_bytes()
    for content, message in [
        (whole[:4096], "index"),
        (whole[: 3 * 4096], "truncated"),
        (b"", "truncated|index"),
        (b"x" * 65536, "index"),
    ]:
        data.write_bytes(content)
        with pytest.raises(StoreFormatError, match=message):
            ParameterStore.open(tmp_path / "store", CONFIG)
    data.unlink()
    with pytest.raises(StoreFormatError, match="missing"):
        ParameterStore.open(tmp_path / "store", CONFIG)
    data.write_bytes(whole)
    ParameterStore.open(tmp_path / "store", CONFIG).close()


def test_every_damaged_page_of_an_index_is_refused_or_was_free(tmp_path: Path) -> None:
    """Whatever reads it names the file; a page that is not in use changes nothing."""
    index = Index.create(tmp_path / "index")
    old = Commit(1, CommittedRecords(), {"seed": b"old"})
    index.write(
        generation=2,
        meta={"a": 1},
        changed=CommittedRecords(),
        state={"seed": b"s"},
        add_snapshots={"old": old},
    )
    index.close()

    def read() -> object:
        with contextlib.closing(Index(tmp_path / "index")) as index:
            return index.read_meta(), index.read_commit(), index.read_commit("old"), index.snapshots()

    expected = read()
    data = tmp_path / "index" / "data.mdb"
    whole = data.read_bytes()
    refused = []
    for page in range(2, len(whole.rstrip(b"\0")) // 4096 + 1):
        data.write_bytes(whole[: page * 4096] + bytes(4096) + whole[(page + 1) * 4096 :])
        try:
            assert read() == expected
        except StoreFormatError as error:
            refused.append(str(error))
    assert len(refused) >= 3  # of meta, state and snapshots
    assert all(said.startswith(f"{data}: ") for said in refused)


def test_identity_is_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreMissingError, match="no store here"):
        ParameterStore.open(tmp_path / "nothing", CONFIG)
    assert not (tmp_path / "nothing").exists()
    small_store(tmp_path / "store").close()
    path = tmp_path / "store" / "tierstore.json"
    whole = json.loads(path.read_text())
    for change, message in [
        ({"format": 1}, "version 1, expected 2"),
        ({"uuid": "another"}, "another store"),
        ({"directories": 0}, "expected the identity"),
    ]:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(StoreFormatError, match=message):
            ParameterStore.open(tmp_path / "store", CONFIG)
    path.write_text("{")
    with pytest.raises(StoreFormatError, match="not JSON"):
        ParameterStore.open(tmp_path / "store", CONFIG)


def test_inactive_belongs_to_the_store(tmp_path: Path) -> None:
    small_store(tmp_path / "store", inactive=Inactive.SKIP).close()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.core.history.config.inactive is Inactive.SKIP
    with pytest.raises(StoreFormatError, match="inactive = skip, not exact"):
        ParameterStore.open(tmp_path / "store", CONFIG, adamw=AdamWConfig())


def test_failed_creation_leaves_nothing(tmp_path: Path) -> None:
    schema = RecordSchema("expert", 3000)
    deep = tmp_path / "a" / "b"
    with pytest.raises(BudgetError, match="minimum is 49152"):
        ParameterStore.create(deep, [schema], StoreConfig(host_budget=4096))
    with pytest.raises(ConfigError, match=r"StoreConfig\.layers"):
        ParameterStore.create(deep, [schema], StoreConfig(cache=CacheConfig(scope=Scope.LAYER)))
    with pytest.raises(ConfigError, match="name of its own"):
        ParameterStore.create(deep, [schema, schema], CONFIG)
    with pytest.raises(OSError, match="log"):
        ParameterStore.create(deep, [schema], CONFIG, io_log=tmp_path / "missing" / "log")
    # A creation that is closed before its first commit was none either.
    with ParameterStore.create(deep, [schema], CONFIG) as store:
        store.register("e", "expert")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "store").mkdir()
    ParameterStore.create(tmp_path / "store", [schema], CONFIG).close()
    assert list((tmp_path / "store").iterdir()) == []
    (tmp_path / "store" / "index").mkdir()
    with pytest.raises(StoreFormatError, match="'index'"):
        ParameterStore.create(tmp_path / "store", [schema], CONFIG)
    assert (tmp_path / "store" / "index").is_dir()


def test_killed_creation_is_no_store_and_is_replaced(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    small_store(whole).close()
    with pytest.raises(StoreExistsError):
        ParameterStore.create(whole, [RecordSchema("expert", 3000)], CONFIG)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    (killed / "tierstore.json").unlink()
    with pytest.raises(StoreMissingError):
        ParameterStore.open(killed, CONFIG)
    with small_store(killed) as store:
        assert store.last_commit.generation == 1
