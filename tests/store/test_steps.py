"""Optimizer steps: one at a time, taken or abandoned as a whole, and never by a store that is left half stepped."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_model, small_store

from tierstore.cache.config import CacheConfig
from tierstore.errors import BudgetError, StoreError, StorePoisonedError
from tierstore.store import ParameterStore, RecordSchema, StoreConfig

NUMEL = 3000
LR = 0.1


def ones(*keys: str) -> dict[str, np.ndarray]:
    return {key: np.ones(NUMEL, np.float32) for key in keys}


def in_a_step(store: ParameterStore, *keys: str, error: Exception | None = None) -> None:
    with store.optimizer_step(LR) as step:
        step.update(ones(*keys))
        if error is not None:
            raise error


def test_a_step_in_parts_is_one_step(tmp_path: Path) -> None:
    model = small_model(NUMEL)
    with small_store(tmp_path / "store", budget=120_000) as store:
        for number in range(3):
            with store.optimizer_step(LR) as step:
                assert (step.number, step.lr) == (number + 1, LR)
                for key in ("e1", "e3"):
                    step.update(ones(key))
            model.update(ones("e1", "e3"), LR)
        assert store.status().steps == 3
        for key, arrays in model.records.items():
            with store.fetch([key]) as lease:
                assert (lease[key].view("weight") == arrays[0]).all()


def test_an_abandoned_step_leaves_no_trace_and_ends_the_caches_step(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        crc = store.records_crc32c()
        ended = store.core.cache.residency.stats().steps
        with store.optimizer_step(LR) as step:
            step.abandon()
            with pytest.raises(StoreError, match="no optimizer step is open"):
                step.update(ones("e0"))
            with pytest.raises(StoreError, match="no optimizer step is open"):
                step.abandon()
        assert store.core.cache.residency.stats().steps == ended + 1
        assert (store.status().steps, store.records_crc32c()) == (0, crc)
        in_a_step(store, "e0")
        assert store.status().steps == 1


def test_a_step_that_a_record_has_taken_cannot_be_abandoned(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:

        def half() -> None:
            with store.optimizer_step(LR) as step:
                step.update(ones("e0"))
                step.abandon()

        with pytest.raises(StoreError, match="records have taken it"):
            half()
        with pytest.raises(StorePoisonedError, match="optimizer step 1 was cut short"):
            store.commit()


def test_what_raises_before_a_record_is_stepped_changes_nothing(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        crc = store.records_crc32c()
        for error in (ZeroDivisionError(), BudgetError("none"), KeyboardInterrupt()):
            with pytest.raises(type(error)):
                in_a_step(store, error=error)
        assert (store.status().steps, store.records_crc32c()) == (0, crc)
        in_a_step(store, "e0")
        assert store.commit() == 2


def test_what_raises_later_poisons(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        with pytest.raises(BudgetError):
            in_a_step(store, "e0", error=BudgetError("too late"))
        with pytest.raises(StorePoisonedError, match="optimizer step 1 was cut short: too late"):
            store.commit()
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.status().steps == 0


def test_steps_out_of_order_are_refused(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        with store.optimizer_step(LR) as first:
            with pytest.raises(StoreError, match="step 1 is open already"):
                in_a_step(store, "e0")
            with pytest.raises(StoreError, match="step 1 is open already"):
                store.update(ones("e0"), lr=LR)
            with pytest.raises(StoreError, match="step 1 is in progress"):
                store.commit()
            first.update(ones("e0"))
        with pytest.raises(StoreError, match="no optimizer step is open"):
            first.update(ones("e1"))
        with store.optimizer_step(LR) as second:
            with pytest.raises(StoreError, match="step 1 is over"):
                first.update(ones("e1"))
            second.update(ones("e1"))
            with pytest.raises(StoreError, match="at optimizer step 2 cannot take step 2"):
                second.update(ones("e1"))
        assert store.status().steps == 2
        assert store.commit() == 2


def test_dirty_entries_are_written_back_after_so_many_steps(tmp_path: Path) -> None:
    config = StoreConfig(host_budget=1 << 20, cache=CacheConfig(write_back_every=2))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], config) as store:
        store.register("e0", "expert")
        store.register("e1", "expert")
        store.commit()
        residency = store.core.cache.residency
        written = []
        for number in range(4):
            if number == 1:
                with store.optimizer_step(LR) as step:
                    step.abandon()  # no step
            store.update(ones("e0"), lr=LR)
            written.append((residency.stats().write_backs, len(residency.dirty_entries())))
        before = written[0][0]  # weights and moments of e0, after the second step and the fourth
        assert written == [(before, 2), (before + 2, 0), (before + 2, 2), (before + 4, 0)]
        asyncio.run(store.update_async(ones("e1"), lr=LR))
        assert len(residency.dirty_entries()) == 2
