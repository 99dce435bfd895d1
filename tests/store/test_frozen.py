"""Frozen records: weights alone, written once, read for ever, in whatever company."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from child_process import child
from conftest_store import flip_bit, weights

from tierstore import _native
from tierstore.errors import StoreError
from tierstore.store import (
    AdamWConfig,
    Group,
    Inactive,
    NewRecord,
    ParameterStore,
    Placement,
    RecordSchema,
    StoreConfig,
    Training,
    WeightFormat,
)
from tierstore.store.disk.store_extents import extent_bytes, scratch_bytes
from tierstore.store.gc import Mode, collect
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import verify_store
from tierstore.store.reading import read_drives, read_schemas

NUMEL, COUNT = 8192, 6
BF16 = 2 * NUMEL  # bytes of one frozen record, a whole number of pages
BASE = RecordSchema("base", NUMEL, WeightFormat.BF16, training=Training.FROZEN)
PAIR = RecordSchema("pair", 1024)
CONFIG = StoreConfig(host_budget=1 << 20, retain=1)
INITIAL = weights(COUNT, NUMEL)


def made(path: Path, *, budget: int = 1 << 20, inactive: Inactive = Inactive.EXACT) -> ParameterStore:
    """Frozen ``e0`` and so on, and trained ``p0`` and so on; committed."""
    config = StoreConfig(host_budget=budget, retain=1)
    store = ParameterStore.create(path, [BASE, PAIR], config, adamw=AdamWConfig(inactive=inactive))
    store.register_many(NewRecord(key, "base", weight=weight) for key, weight in INITIAL.items())
    store.register_many(NewRecord(f"p{i}", "pair") for i in range(COUNT))
    store.commit()
    return store


def rounded(key: str) -> np.ndarray:
    """The bits of the bf16 rounding."""
    return torch.from_numpy(INITIAL[key]).bfloat16().view(torch.uint16).numpy()


def base_bytes(path: Path) -> int:
    return (path / "extents" / "base.weights").stat().st_size


def written(store: ParameterStore) -> int:
    return int(store.core.engine.stats()["written_bytes"])


def step(store: ParameterStore, number: int) -> None:
    gradient = np.full(1024, 0.1 * number, np.float32)
    store.update({"p0": gradient, f"p{number % COUNT}": gradient}, lr=1e-2)


def check(store: ParameterStore) -> None:
    for key in INITIAL:
        with store.fetch([key]) as lease:
            assert lease[key].sections == ["weight"]
            assert np.array_equal(lease[key].view("weight"), rounded(key))


def test_a_schema_has_weights_alone() -> None:
    assert BASE.groups == (Group.WEIGHTS,)
    assert [BASE.layout(group).slot_bytes for group in Group] == [BF16, 0, 0]
    assert (BASE.record_bytes, BASE.sections) == (BF16, 1)
    assert extent_bytes(BASE, 10, retain=3) == 10 * BF16, "one copy, however many snapshots"
    assert scratch_bytes(BASE, 10) == 0
    assert minimum_host_budget([BASE]) == BF16


def test_two_bytes_a_parameter_and_one_copy_on_disk(tmp_path: Path) -> None:
    with made(tmp_path / "s") as store:
        names = {file.name for file in (tmp_path / "s" / "extents").iterdir()}
        assert names == {"base.weights", "pair.weights", "pair.moments"}
        for number in range(4):
            step(store, number)
            store.commit(snapshot=f"s{number}")
        check(store)
        assert base_bytes(tmp_path / "s") == COUNT * BF16
    (drive,) = read_drives(tmp_path / "s")
    assert drive.used_bytes == COUNT * BF16 + COUNT * 3 * 4096, "the one snapshot is the last commit"


def test_they_are_written_once_and_never_again(tmp_path: Path) -> None:
    """With memory for two of them beside everything trained: they come and go all the time, and always clean."""
    pairs = COUNT * 4 * 4096
    with made(tmp_path / "s", budget=2 * BF16 + pairs) as store:
        registered = store.core.extents.of(0, Group.WEIGHTS).extents[0]
        file = registered.file
        before, stats = written(store), store.core.cache.residency.stats()
        assert before == COUNT * (BF16 + 3 * 4096)
        for number in range(30):
            for key in INITIAL:
                with store.fetch([key]):
                    pass
            step(store, number)
        store.commit()
        check(store)
        after = store.core.cache.residency.stats()
        assert after.read_bytes - stats.read_bytes > 100 * BF16, "they did come and go"
        pages = (written(store) - before) // 4096
        assert pages == 3 * COUNT, "the trained records, once, at the commit"
        assert file.size == COUNT * BF16


@pytest.mark.parametrize("inactive", Inactive)
def test_steps_pass_them_by(tmp_path: Path, inactive: Inactive) -> None:
    """They are never behind, and keep no step's row alive."""
    with made(tmp_path / "s", inactive=inactive) as store:
        for _ in range(5):
            store.update({f"p{i}": np.ones(1024, np.float32) for i in range(COUNT)}, lr=0.1)
            assert store.core.optimizer.behind(store.core.record("e0")) == 0
        store.commit()
        assert len(store.core.history.pack()) < 100, "no rows are kept for them"
        assert store.info("e0").step == 0
        check(store)


def test_reopened_verified_and_of_equal_content(tmp_path: Path) -> None:
    with made(tmp_path / "s") as store:
        step(store, 1)
        store.commit()
        crc = store.records_crc32c()
    report = verify_store(tmp_path / "s")
    assert (report.failures, report.records, report.sections) == ([], 2 * COUNT, COUNT + 3 * COUNT)
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        assert store.records_crc32c() == crc
        assert store.info("e3").schema == BASE
        check(store)
        step(store, 2)
        store.commit()
        assert store.verify().failures == []


def test_damage_is_found_where_it_is(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    flip_bit(tmp_path / "s" / "extents" / "base.weights", 8 * (2 * BF16 + 5))
    (failure,) = verify_store(tmp_path / "s").failures
    assert "record 'e2', section weight" in failure


def test_all_sections_of_one_are_its_weight(tmp_path: Path) -> None:
    """As an importer has them, and as a store that is cut anew gets them."""
    with ParameterStore.create(tmp_path / "s", [BASE], CONFIG) as store:
        bits = rounded("e0")
        store.register_many([NewRecord("e0", "base", sections=lambda: [bits])])
        with pytest.raises(ValueError, match=r"sections of \[32768\] bytes, expected \[16384\]"):
            store.register_many([NewRecord("e1", "base", sections=lambda: [INITIAL["e0"]])])
        with store.fetch(["e0"]) as lease:
            assert np.array_equal(lease["e0"].view("weight"), bits)


def test_whole_fp32_weights(tmp_path: Path) -> None:
    schema = RecordSchema("whole", NUMEL, training=Training.FROZEN)
    with ParameterStore.create(tmp_path / "s", [schema], CONFIG) as store:
        store.register("e0", "whole", weight=INITIAL["e0"])
        store.commit()
        with store.fetch(["e0"]) as lease:
            assert np.array_equal(lease["e0"].view("weight"), INITIAL["e0"])


def test_one_that_its_owner_holds_is_written_once(tmp_path: Path) -> None:
    schema = RecordSchema("dense", 1024, placement=Placement.DIRECT, training=Training.FROZEN)
    arena = _native.Arena(8192, _native.HugePages.OFF)
    buffers = [_native.Buffer(arena, [(at, 4096)], 4096) for at in (0, 4096)]
    with ParameterStore.create(tmp_path / "s", [schema], CONFIG) as store:
        store.register("d", "dense")
        with pytest.raises(StoreError, match="held by its owner"):
            store.commit()
        buffers[0].copy_from(INITIAL["e0"][:1024].view(np.uint8))
        store.core.write_through("d", {Group.WEIGHTS: [buffers[0]]}, step=0)
        store.commit()
        with pytest.raises(StoreError, match="'d' is frozen"):
            store.core.write_through("d", {Group.WEIGHTS: [buffers[1]]}, step=1)
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        store.core.read_through("d", {Group.WEIGHTS: [buffers[1]]})
        found = np.empty(4096, np.uint8)
        buffers[1].copy_to(found)
        assert np.array_equal(found.view(np.float32), INITIAL["e0"][:1024])


def test_garbage_of_a_registration_that_was_cut_short(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        expected = store.records_crc32c()
        store.register_many(NewRecord(f"late{i}", "base", weight=INITIAL["e0"]) for i in range(5))
        store.core.cache.clean()
        store.core.wait(store.core.cache.write_backs.take())
    assert base_bytes(tmp_path / "s") == (COUNT + 5) * BF16
    report = collect(tmp_path / "s", Mode.REMOVE)
    assert ({item.path.name for item in report.garbage}, report.left) >= ({"base.weights"}, [])
    assert base_bytes(tmp_path / "s") == COUNT * BF16
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        assert store.records_crc32c() == expected


_REGISTERING = """
import sys, numpy as np
from tierstore.store import *
with ParameterStore.open(sys.argv[1], StoreConfig(host_budget=1 << 20, retain=1)) as store:
    for i in range(1000):
        store.register_many([NewRecord(f"more{i}", "base", weight=np.full(8192, i, np.float32))])
        if i % 3 == 0:
            print(store.commit(), i, flush=True)
"""


def test_a_registration_that_is_killed_goes_on(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """As an import is: what was acknowledged is there, whole, and the rest is registered again."""
    made(tmp_path / "s").close()
    with child(_REGISTERING, tmp_path / "s") as process:
        lines = [process.answer() for _ in range(5)]
        process.kill()
        lines += process.stdout.readlines()
    generation, last = (int(word) for word in lines[-1].split())
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        assert store.last_commit.generation in (generation, generation + 1)
        there = [key for key in store.keys if key.startswith("more")]
        assert len(there) in (last + 1, last + 4)
        assert store.verify().failures == []
        store.register_many([NewRecord(f"more{len(there)}", "base")])
        store.commit()
        check(store)
    record_property("commits", generation)


def test_pairs_come_to_a_frozen_store_later(tmp_path: Path) -> None:
    """Schemas of records that nobody thought of when the store was made; it has them once a commit has."""
    with ParameterStore.create(tmp_path / "s", [BASE], CONFIG) as store:
        store.register_many(NewRecord(key, "base", weight=weight) for key, weight in INITIAL.items())
        store.commit()
    with ParameterStore.open(tmp_path / "s", CONFIG, further=[PAIR]) as store:
        store.register("p0", "pair", weight=np.ones(1024, np.float32))
        store.core.committer.begin()  # killed before the commit, so to say
    assert read_schemas(tmp_path / "s") == [BASE]
    (report,) = collect(tmp_path / "s", Mode.DRY_RUN).left[:1]
    assert "pair.moments: not an extent of this store" in report
    with ParameterStore.open(tmp_path / "s", CONFIG, further=[PAIR, BASE]) as store:
        assert "p0" not in store.keys
        store.register_many(NewRecord(f"p{i}", "pair") for i in range(COUNT))
        step(store, 1)
        store.commit()
        expected = store.records_crc32c()
    assert read_schemas(tmp_path / "s") == [BASE, PAIR]
    with pytest.raises(StoreError, match="it has a schema 'pair' already"):
        ParameterStore.open(tmp_path / "s", CONFIG, further=[RecordSchema("pair", 1025)])
    with ParameterStore.open(tmp_path / "s", CONFIG, further=[PAIR]) as store:
        assert store.records_crc32c() == expected
        check(store)
        step(store, 2)
        store.commit()
    assert verify_store(tmp_path / "s").failures == []
