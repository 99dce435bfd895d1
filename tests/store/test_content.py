"""The checksum of a store's content changes nothing, wherever the bytes lie and however far behind records are."""

from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store

from tierstore.store import ParameterStore, WeightFormat
from tierstore.store.format import COMMITTED_GROUPS, TRAINED_FORMATS

NUMEL, COUNT = 3000, 12


def gradients(*keys: str) -> dict[str, np.ndarray]:
    return {key: np.full(NUMEL, 0.5, np.float32) for key in keys}


def stepped(path: Path, budget: int, weight_format: WeightFormat) -> ParameterStore:
    """Three steps: e0 is stepped in all of them, e1 in the first, the others in none. Committed."""
    store = small_store(path, count=COUNT, numel=NUMEL, budget=budget, weight_format=weight_format)
    for keys in (("e0", "e1"), ("e0",), ("e0",)):
        store.update(gradients(*keys), lr=0.1)
    store.commit()
    return store


@pytest.mark.parametrize("weight_format", TRAINED_FORMATS)
def test_a_checksum_of_records_with_missed_steps_writes_nothing(
    tmp_path: Path, weight_format: WeightFormat
) -> None:
    """With a cache of 3 of 12 records, most are on disk and behind; those in the cache are behind, too."""
    with stepped(tmp_path / "s", 200_000, weight_format) as store:
        with store.fetch(["e5"]):
            pass  # caught up, not committed
        engine, residency = store.core.engine, store.core.cache.residency
        before = residency.stats(), residency.resident_entries().tolist(), residency.dirty_entries().tolist()
        steps, written = [store.info(key).step for key in store.keys], engine.stats()["written_bytes"]
        assert len(before[1]) < COUNT
        assert min(steps) < 3

        crc = store.records_crc32c()

        after = residency.stats(), residency.resident_entries().tolist(), residency.dirty_entries().tolist()
        assert after == before
        assert [store.info(key).step for key in store.keys] == steps
        assert engine.stats()["written_bytes"] == written
        # What it summed is what the records hold once they are caught up.
        for key in store.keys:
            store.fetch([key], COMMITTED_GROUPS).release()
        assert {store.info(key).step for key in store.keys} == {3}
        assert store.records_crc32c() == crc
        store.commit()
        assert store.records_crc32c() == crc
    with stepped(tmp_path / "whole", 1 << 20, weight_format) as whole:
        assert whole.records_crc32c() == crc


def test_progress_counts_bytes(tmp_path: Path) -> None:
    """Three records of 3,000 weights and two moments each, in fp32."""
    calls: list[tuple[int, int]] = []
    with small_store(tmp_path / "s", count=3) as store:
        crc = store.records_crc32c(lambda done, total: calls.append((done, total)))
        assert crc == store.records_crc32c()
    assert calls == [(done * 36_000, 108_000) for done in range(4)]
