"""Only what is dirty is written: bytes to the drive against bytes changed, the index and padding included."""

from pathlib import Path

import numpy as np
import pytest
from conftest_store import weights

from tierstore.store import AdamWConfig, Inactive, ParameterStore, RecordSchema, StoreConfig, WeightFormat
from tierstore.store.disk.write_budget import _thread_written_bytes
from tierstore.store.format import TRAINED_FORMATS, Group
from tierstore.store.index.live import LiveRecord

NUMEL = 100_003  # no section ends at a page's end
COUNT = 12
RECORD = 12 * NUMEL


class Written:
    """What reached the drive since it was made: extents through the engine, the index by this thread."""

    def __init__(self, store: ParameterStore) -> None:
        self._store = store
        self._extents = int(store.core.engine.stats()["written_bytes"])
        self._index = _thread_written_bytes()

    @property
    def extents(self) -> int:
        return int(self._store.core.engine.stats()["written_bytes"]) - self._extents

    @property
    def index(self) -> int:
        found = _thread_written_bytes() - self._index
        assert found > 0, "a commit writes its index"
        return found


def made(path: Path, *, budget: int, weight_format: WeightFormat) -> ParameterStore:
    store = ParameterStore.create(
        path,
        [RecordSchema("expert", NUMEL, weight_format)],
        StoreConfig(host_budget=budget, retain=1),
        # Nobody else's record changes by a step.
        adamw=AdamWConfig(inactive=Inactive.SKIP),
    )
    for key, weight in weights(COUNT, NUMEL).items():
        store.register(key, "expert", weight=weight)
    store.commit()
    return store


def gradients(*numbers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(sum(numbers))
    return {f"e{number}": rng.standard_normal(NUMEL).astype(np.float32) for number in numbers}


@pytest.mark.parametrize("weight_format", TRAINED_FORMATS)
def test_a_commit_writes_each_dirty_group_once(tmp_path: Path, weight_format: WeightFormat) -> None:
    with made(tmp_path / "store", budget=64 << 20, weight_format=weight_format) as store:
        slot = sum(
            store.info("e0").schema.layout(group).slot_bytes for group in (Group.WEIGHTS, Group.MOMENTS)
        )
        for touched in ((0, 3, 7), (1,), tuple(range(COUNT))):
            written = Written(store)
            for _ in range(3):  # dirty three times, and once to be written
                store.update(gradients(*touched), lr=1e-3)
            store.fetch(["e2"]).release()
            assert written.extents == 0
            store.commit()
            assert written.extents == slot * len(touched)
            assert (written.extents + written.index) / (RECORD * len(touched)) <= 1.05
        written = Written(store)
        store.fetch(["e0", "e1"], (Group.WEIGHTS, Group.MOMENTS)).release()
        store.commit(snapshot="a snapshot is a table")
        assert written.extents == 0


def test_training_traffic_with_evictions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the records fits: write-backs are of what was stepped since the last one, and of whole groups."""
    rng = np.random.default_rng(3)
    with made(tmp_path / "store", budget=6 * RECORD, weight_format=WeightFormat.SPLIT_BF16) as store:
        decided = store.core.cache.residency.stats().written_bytes
        written, index, changed = Written(store), 0, 0
        stepped_since: set[tuple[str, int]] = set()
        write = LiveRecord.write

        def counting(record: LiveRecord, group: int, *rest: object) -> int:
            nonlocal changed
            key = record.key
            assert (key, group) in stepped_since, "a write-back of what did not change"
            stepped_since.discard((key, group))
            changed += sum(section.nbytes for section in store.info(key).schema.layout(Group(group)).sections)
            return write(record, group, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(LiveRecord, "write", counting)
        for step in range(24):
            touched = sorted(int(i) for i in rng.choice(COUNT, 4, replace=False))
            stepped_since |= {(f"e{i}", group) for i in touched for group in (0, 1)}
            store.update(gradients(*touched), lr=1e-3)
            if step % 8 == 7:
                before = _thread_written_bytes()
                store.commit()
                index += _thread_written_bytes() - before
                assert not stepped_since, "a commit leaves nothing dirty"
        assert store.core.cache.residency.stats().evictions
        assert written.extents == store.core.cache.residency.stats().written_bytes - decided
        assert 1.0 <= (written.extents + index) / changed <= 1.05
