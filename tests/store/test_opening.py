"""What an opening decides of budgets."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store

from tierstore._native import IoBackend
from tierstore.cache.config import CacheConfig, Scope
from tierstore.errors import BudgetError, ConfigError
from tierstore.store import ParameterStore, RecordSchema, StoreConfig, WeightFormat
from tierstore.store.config import IoBackendName
from tierstore.store.opening import check_budget, minimum_host_budget

SCHEMA = RecordSchema("expert", 4096, WeightFormat.FP32)


def test_the_smallest_share_must_hold_a_record() -> None:
    plain = CacheConfig(scope=Scope.LAYER)
    uneven = CacheConfig(scope=Scope.LAYER, layer_shares=(3.0, 1.0))
    each = minimum_host_budget([SCHEMA])
    assert minimum_host_budget([SCHEMA], plain, 2) == 2 * each
    assert minimum_host_budget([SCHEMA], uneven, 2) == 4 * each
    check_budget(StoreConfig(host_budget=4 * each, cache=uneven), [SCHEMA], [0, 1])
    with pytest.raises(BudgetError, match=f"the minimum is {4 * each} bytes"):
        check_budget(StoreConfig(host_budget=4 * each - 1, cache=uneven), [SCHEMA], [0, 1])
    # A share of a third, rounded down as text: three records' worth is enough.
    rounded = CacheConfig(scope=Scope.LAYER, layer_shares=(0.333333333, 0.333333333, 0.333333334))
    assert minimum_host_budget([SCHEMA], rounded, 3) == 3 * each
    with pytest.raises(ConfigError, match="layer_shares: expected 3, one for each layer, got 2"):
        check_budget(StoreConfig(host_budget=9 * each, cache=uneven), [SCHEMA], [0, 1, 2])


def test_a_budget_that_the_machine_has_not_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(
        BudgetError, match=f"host_budget: expected what this machine can give, got {1 << 50} bytes"
    ):
        ParameterStore.create(tmp_path / "s", [SCHEMA], StoreConfig(host_budget=1 << 50))
    assert not list(tmp_path.iterdir())


def test_a_closed_store_is_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    """Its arena is as large as the host budget: it must not wait for a collection."""
    store = small_store(tmp_path / "store")
    store.update({"e0": np.ones(3000, np.float32)}, lr=0.1)
    store.commit()
    core = weakref.ref(store.core)
    gc.disable()
    try:
        store.close()
        del store
        assert core() is None
    finally:
        gc.enable()


def test_the_configuration_names_the_engine_s_backends() -> None:
    assert {name.name for name in IoBackendName} == {backend.name for backend in IoBackend}
