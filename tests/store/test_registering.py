"""Fresh records: what their memory held before, and what a failure leaves of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tierstore.store import Group, IoConfig, ParameterStore, RecordSchema, StoreConfig
from tierstore.store.parameter_store import NewRecord

NUMEL = 1 << 18
CONFIG = StoreConfig(host_budget=5 * NUMEL * 4)


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


def test_a_weight_that_cannot_be_made_leaves_nothing_of_its_record(tmp_path: Path) -> None:
    """Those before it stay; it and those behind it can be registered again."""

    def broken() -> np.ndarray:
        raise ZeroDivisionError

    keys = ["new0", "new1", "new2", "new3"]
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], CONFIG) as store:
        store.register("e0", "expert")
        new = [NewRecord(key, "expert", weight=lambda: np.ones(NUMEL, np.float32)) for key in keys]
        with pytest.raises(ZeroDivisionError):
            store.register_many([*new[:2], replace(new[2], weight=broken), new[3]])
        assert [key for key in store.keys if key.startswith("new")] == keys[:2]
        assert len(store.slots.records) == 3
        store.register_many(new[2:])
        store.update({key: np.ones(NUMEL, np.float32) for key in ("e0", *keys)}, lr=0.1)
        store.commit()
        crc = store.records_crc32c()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (len(store.keys), store.records_crc32c()) == (5, crc)
