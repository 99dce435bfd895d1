"""Fresh records: what their memory held before, and what a refusal or a failure leaves of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore._native import Arena, Buffer, HugePages
from tierstore.errors import BudgetError
from tierstore.store import (
    CacheConfig,
    Group,
    IoConfig,
    NewRecord,
    ParameterStore,
    RecordSchema,
    Scope,
    StoreConfig,
)
from tierstore.store.format import COMMITTED_GROUPS, Placement, Training, WeightFormat
from tierstore.store.parameter_store import verify_store
from tierstore.store.registering import RecordLoader, register_many

NUMEL = 1 << 18
CONFIG = StoreConfig(host_budget=5 * NUMEL * 4)
ONES = np.ones(NUMEL, np.float32)


def test_moments_start_at_zero_whatever_their_memory_held(tmp_path: Path) -> None:
    """Both moment sections, also when several compute threads fill them and the entry is evicted at once."""
    config = StoreConfig(host_budget=5 * NUMEL * 4, io=IoConfig(compute_threads=3))
    schema = RecordSchema("expert", NUMEL)
    ones = np.ones(NUMEL, np.float32)
    with ParameterStore.create(tmp_path / "store", [schema], config) as store:
        for i in range(24):
            store.register(f"e{i}", "expert", weight=ones)
            store.update({f"e{i}": ones}, lr=1e-3)  # leaves ones behind in the moments' frames
        store.register("late", "expert")
        for i in range(4):
            store.register(f"late{i}", "expert")
        for name in ("late", "late0", "late1", "late2", "late3"):
            with store.fetch([name], [Group.MOMENTS]) as lease:
                assert not lease[name].copy("exp_avg").any(), name
                assert not lease[name].copy("exp_avg_sq").any(), name


def state(store: ParameterStore) -> tuple[Any, ...]:
    """Everything that counts in a later reservation."""
    extents = store.core.extents
    return (
        store.keys,
        store.core.records.counts(),
        +extents.promised,
        extents.allocated_bytes,
        store.core.cache.residency.stats().creates,
    )


def broken() -> np.ndarray:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("weight", "error"), [(broken, ZeroDivisionError), (lambda: np.ones(5, np.float32), ValueError)]
)
def test_a_weight_that_cannot_be_made_leaves_nothing_of_its_record(
    tmp_path: Path, weight: Callable[[], np.ndarray], error: type[Exception]
) -> None:
    """Those before it stay; it and those behind it count in no later reservation, and can be registered again."""
    keys = ["new0", "new1", "new2", "new3"]
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], CONFIG) as store:
        store.register("e0", "expert")
        new = [NewRecord(key, "expert", weight=lambda: ONES) for key in keys]
        with pytest.raises(error):
            store.register_many([*new[:2], replace(new[2], weight=weight), new[3]])
        assert store.keys == ["e0", *keys[:2]]
        assert store.core.records.counts() == {"expert": 3}
        assert sum(store.core.extents.promised.values()) <= 3
        store.register_many(new[2:])
        store.update(dict.fromkeys(("e0", *keys), ONES), lr=0.1)
        store.commit()
        crc = store.records_crc32c()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (len(store.keys), store.records_crc32c()) == (5, crc)


def test_threads_that_make_weights_change_nothing(tmp_path: Path) -> None:
    """The order, the content and what stays after an error are those of one thread; few contents are in memory at once."""
    made: list[int] = []
    taken: list[tuple[int, int]] = []
    most = 0

    def weight(number: int) -> np.ndarray:
        nonlocal most
        made.append(number)
        most = max(most, len(made) - len(taken))
        return broken() if number == 9 else np.full(NUMEL, number, np.float32)

    def progress(done: int, total: int) -> None:
        taken.append((done, total))

    new = [NewRecord(f"e{number}", "expert", weight=partial(weight, number)) for number in range(12)]
    found = []
    for threads in (1, 3):
        made.clear(), taken.clear()
        directory = tmp_path / str(threads)
        with ParameterStore.create(directory, [RecordSchema("expert", NUMEL)], CONFIG) as store:
            with pytest.raises(ZeroDivisionError):
                register_many(store.core, new, threads=threads, progress=progress)
            assert store.keys == [f"e{number}" for number in range(9)]
            found.append(store.records_crc32c())
        assert taken == [(number, 12) for number in range(1, 10)]
        assert most <= threads
    assert found[0] == found[1]


def test_a_record_for_which_leases_leave_no_room_is_not_added(tmp_path: Path) -> None:
    cache = CacheConfig(scope=Scope.LAYER)
    config = StoreConfig(host_budget=10 * NUMEL * 4, cache=cache, layers=(0, 1))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], config) as store:
        store.register("e0", "expert")
        with store.fetch(["e0"], [Group.WEIGHTS, Group.MOMENTS]):
            expected = state(store)
            with pytest.raises(BudgetError):
                store.register("new", "expert")
            assert state(store)[:3] == expected[:3]
            store.register("other", "expert", layer=1)
        store.register("new", "expert", weight=ONES)
        with store.fetch(["new"]) as lease:
            assert (lease["new"].view("weight") == ONES).all()
        assert store.commit() == 1
        assert store.verify().failures == []


# Records written past the host cache ------------------------------------------------------------------------


_NUMEL = 3000
_BF16 = RecordSchema("half", _NUMEL, WeightFormat.SPLIT_BF16)
_FP32 = RecordSchema("full", _NUMEL)
_OWNED = RecordSchema("owned", _NUMEL, placement=Placement.DIRECT)
_FROZEN = RecordSchema("frozen", _NUMEL, WeightFormat.BF16, training=Training.FROZEN)
_CONFIG = StoreConfig(host_budget=1 << 20)


def _buffer(array: np.ndarray[Any, Any]) -> Buffer:
    size = -(-array.nbytes // 4096) * 4096
    buffer = Buffer(Arena(size, HugePages.OFF), [(0, size)], array.nbytes)
    buffer.copy_from(np.ascontiguousarray(array).view(np.uint8))
    return buffer


def _create(path: Path) -> ParameterStore:
    return ParameterStore.create(path, [_BF16, _FP32, _OWNED, _FROZEN], _CONFIG)


def _sections(store: ParameterStore, key: str) -> dict[str, np.ndarray[Any, Any]]:
    groups = store.info(key).schema.groups
    with store.fetch([key], groups) as lease:
        return {name: lease[key].copy(name) for name in lease[key].sections}


def test_leading_sections_are_written_and_zeros_are_not(tmp_path: Path) -> None:
    high = np.arange(_NUMEL, dtype=np.uint16)
    wide = np.arange(_NUMEL, dtype=np.float32)
    with _create(tmp_path / "s") as store:
        loader = RecordLoader(store.core)
        store.reserve({"half": 2, "full": 1, "frozen": 1})
        store.commit()
        loader.add("a", "half", 0, [_buffer(high), None, None, None])
        loader.add("b", "half", 0, [_buffer(high), _buffer(high.view(np.int16)), None, None])
        loader.add("c", "full", 1, [_buffer(wide), None, None])
        loader.add("d", "frozen", 1, [_buffer(high)])
        store.commit()
        written = sum(drive.written_bytes for drive in store.status().drives)
        assert written == 8192 * 3 + 12288 + 8192  # hi, hi and lo, fp32, frozen; moments of nobody
        found = {key: _sections(store, key) for key in "abcd"}
        crc = store.records_crc32c()
    assert np.array_equal(found["a"]["weight_hi"], high)
    assert not any(found["a"][name].any() for name in ("weight_lo", "exp_avg", "exp_avg_sq"))
    assert np.array_equal(found["b"]["weight_lo"], high.view(np.int16))
    assert np.array_equal(found["c"]["weight"], wide)
    assert np.array_equal(found["d"]["weight"], high)
    assert verify_store(tmp_path / "s").failures == []
    with ParameterStore.open(tmp_path / "s", _CONFIG) as store:
        assert store.records_crc32c() == crc


def test_it_is_what_registering_makes(tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal(_NUMEL).astype(np.float32)
    with _create(tmp_path / "a") as store:
        store.register("x", "full", weight=weight)
        store.commit()
        wanted = store.records_crc32c()
    with _create(tmp_path / "b") as store:
        loader = RecordLoader(store.core)
        store.reserve({"full": 1})
        loader.add("x", "full", 0, [_buffer(weight), None, None])
        store.commit()
        assert store.records_crc32c() == wanted
        store.update({"x": weight}, lr=0.1)
        stepped = store.records_crc32c()
    with ParameterStore.open(tmp_path / "a", _CONFIG) as store:
        store.update({"x": weight}, lr=0.1)
        assert store.records_crc32c() == stepped


@pytest.mark.parametrize("holes", ["punched", "refused"])
def test_zeros_are_written_where_a_slot_may_hold_something(
    holes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = np.ones(_NUMEL, np.float32)
    with _create(tmp_path / "s") as store:
        store.reserve({"full": 1})
        store.commit()
    for path in (tmp_path / "s/extents").iterdir():
        path.write_bytes(b"\xff" * path.stat().st_size)
    with ParameterStore.open(tmp_path / "s", _CONFIG) as store:
        if holes == "refused":
            from tierstore.store.disk.extents import Extent

            monkeypatch.setattr(Extent, "clear_holes", lambda self: None)
        loader = RecordLoader(store.core)
        store.reserve({"full": 1})
        loader.add("x", "full", 0, [_buffer(wide), None, None])
        store.commit()
        written = sum(drive.written_bytes for drive in store.status().drives)
        assert written == 12288 * (1 if holes == "punched" else 3)
        found = _sections(store, "x")
        assert np.array_equal(found["weight"], wide)
        assert not found["exp_avg"].any()
    assert verify_store(tmp_path / "s").failures == []


def test_slots_that_were_freed_are_not_taken_for_zeros(tmp_path: Path) -> None:
    weight = np.full(_NUMEL, 2, np.float32)
    with _create(tmp_path / "s") as store:
        loader = RecordLoader(store.core)
        store.register("x", "full", weight=weight)
        for _ in range(3):  # copy on write: each step leaves the slots of the commit before
            store.commit()
            store.update({"x": weight}, lr=0.1)
        store.commit()
        loader.add("y", "full", 0, [None, None, None])
        store.reserve()
        loader.add("z", "full", 0, [_buffer(weight), None, None])
        store.commit()
        for key in "yz":
            found = _sections(store, key)
            assert not found["exp_avg"].any()
            assert not found["exp_avg_sq"].any()
    assert verify_store(tmp_path / "s").failures == []


def test_records_of_an_owner(tmp_path: Path) -> None:
    wide = np.arange(_NUMEL, dtype=np.float32)
    with _create(tmp_path / "s") as store:
        loader = RecordLoader(store.core)
        store.reserve({"owned": 1})
        loader.wait(loader.add("x", "owned", 0, [_buffer(wide), None, None]))
        store.commit()
        into = {group: [] for group in COMMITTED_GROUPS}
        for group, count in zip(COMMITTED_GROUPS, (1, 2), strict=True):
            into[group] = [_buffer(np.full(_NUMEL, 7, np.float32)) for _ in range(count)]
        store.core.read_through("x", into)
        arrays = [buffer.array().view(np.float32) for group in COMMITTED_GROUPS for buffer in into[group]]
    assert np.array_equal(arrays[0], wide)
    assert not arrays[1].any()
    assert not arrays[2].any()
