"""What an opening decides of budgets."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store

from tierstore._native import IoBackend
from tierstore.cache.config import CacheConfig, Scope
from tierstore.errors import BudgetError, ConfigError
from tierstore.machine_profile import IoPoint, save_io_point
from tierstore.store import ParameterStore, RecordSchema, StoreConfig, WeightFormat
from tierstore.store.config import IoBackendName, IoConfig, tune
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


# Transfer size and depth ------------------------------------------------------------------------------------


POINT = IoPoint(
    chunk_bytes=256 << 10, queue_depth=5, read_bytes_per_s=1e9, write_bytes_per_s=1e9, measured="2026-01-02"
)


def test_built_in_without_a_profile(profile: Path, tmp_path: Path) -> None:
    found = tune(IoConfig(), tmp_path)
    assert (found.chunk_bytes, found.queue_depth) == (1 << 20, 32)
    assert str(found).startswith("1 MiB, 32 in flight (built in, because ")
    assert "has not measured this disk" in str(found)
    assert str(tune(IoConfig(), None)) == "1 MiB, 32 in flight (built in)"


def test_as_measured(profile: Path, tmp_path: Path) -> None:
    save_io_point(tmp_path, POINT)
    assert str(tune(IoConfig(), tmp_path)) == "256 KiB, 5 in flight (measured 2026-01-02)"


def test_what_is_configured_wins_each_for_itself(profile: Path, tmp_path: Path) -> None:
    save_io_point(tmp_path, POINT)
    deep = tune(IoConfig(queue_depth=9), tmp_path)
    assert str(deep) == "256 KiB (measured 2026-01-02), 9 in flight (as configured)"
    large = tune(IoConfig(chunk_bytes=8192), tmp_path)
    assert (large.chunk_bytes, large.queue_depth) == (8192, 5)
    both = tune(IoConfig(chunk_bytes=8192, queue_depth=9), tmp_path)
    assert str(both) == "8 KiB, 9 in flight (as configured)"


def test_a_broken_profile_is_said_and_does_no_harm(profile: Path, tmp_path: Path) -> None:
    profile.parent.mkdir()
    profile.write_text("{")
    found = tune(IoConfig(), tmp_path)
    assert (found.chunk_bytes, found.queue_depth) == (1 << 20, 32)
    assert f"the profile cannot be read: {profile}: not an I/O profile: not JSON" in str(found)
    # Who has said everything needs no profile.
    assert (
        str(tune(IoConfig(chunk_bytes=8192, queue_depth=9), tmp_path)) == "8 KiB, 9 in flight (as configured)"
    )


def test_a_store_uses_it_and_holds_the_same_bytes(profile: Path, tmp_path: Path) -> None:
    weight = np.arange(30_000, dtype=np.float32)
    checksums = set()
    points = [None, POINT, replace(POINT, chunk_bytes=4096, queue_depth=1)]
    for number, point in enumerate(points):
        if point is not None:
            save_io_point(tmp_path, point)
        config = StoreConfig(host_budget=8 << 20)
        with ParameterStore.create(tmp_path / str(number), [RecordSchema("r", weight.size)], config) as store:
            (line,) = [line for line in store.status().effective if line.startswith("transfers: ")]
            assert ("built in" if point is None else f"{point.queue_depth} in flight (measured") in line
            for key in "abcd":
                store.register(key, "r", weight=weight)
            store.commit()
            checksums.add(store.records_crc32c())
            assert store.verify().failures == []
    assert len(checksums) == 1


@pytest.mark.parametrize("wrong", [{"queue_depth": -1}, {"chunk_bytes": 1000}, {"chunk_bytes": -4096}])
def test_bad_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        IoConfig(**wrong)
