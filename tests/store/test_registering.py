"""Fresh records in recycled memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tierstore.store import Group, IoConfig, ParameterStore, RecordSchema, StoreConfig

NUMEL = 1 << 18


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
