"""Fresh records: what their memory held before, and what a refusal or a failure leaves of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierstore.errors import BudgetError, StoreError
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


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (NewRecord("new", "expert", weight=np.ones(5, np.float32)), r"'new': weight is float32 \(5,\)"),
        (NewRecord("new", "expert", weight=np.ones(NUMEL)), "'new': weight is float64"),
        (NewRecord("new", "expert", layer=1 << 16), "a layer from 0 to 65535"),
        (NewRecord("", "expert"), "record"),
        (NewRecord("e0", "expert"), "exists already"),
        (NewRecord("new", "dense"), "this store has: expert"),
    ],
    ids=["shape", "type", "layer", "name", "key", "schema"],
)
@pytest.mark.parametrize("before", [0, 2], ids=["alone", "behind others"])
def test_a_refused_registration_changes_nothing(
    tmp_path: Path, new: NewRecord, error: str, before: int
) -> None:
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], CONFIG) as store:
        store.register("e0", "expert")
        expected = state(store)
        good = [NewRecord(f"good{i}", "expert", weight=ONES) for i in range(before)]
        with pytest.raises((ValueError, StoreError), match=error):
            store.register_many([*good, new])
        assert state(store) == expected
        store.register("new", "expert")
        assert store.commit() == 1


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
