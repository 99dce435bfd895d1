"""Where records lie between commits, and what the index says of it after them."""

from pathlib import Path

import numpy as np
from conftest_store import small_store

from tierstore._native import Arena, Buffer, HugePages
from tierstore.store import ParameterStore, Placement, RecordSchema, StoreConfig
from tierstore.store.format import COMMITTED_GROUPS, Group
from tierstore.store.index.database import Index
from tierstore.store.index.live import LiveRecord

NUMEL = 3000
SLOT_BYTES = 12288  # of one section


def generations(directory: Path) -> dict[str, tuple[int, ...]]:
    """For each record, the commits that wrote its groups."""
    index = Index(directory / "index")
    table = index.read_commit().records
    index.close()
    return {key: tuple(location.generation for location in entry.groups) for key, entry in table.items()}


def update(store: ParameterStore, *keys: str) -> None:
    store.update({key: np.ones(NUMEL, np.float32) for key in keys}, lr=0.1)


def test_a_location_has_the_generation_of_the_commit_that_wrote_it(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", count=3, retain=1) as store:
        update(store, "e0", "e1")
        store.commit()
        update(store, "e1")
        store.commit(snapshot="kept")
        store.commit({"nothing": b"but state"})
    assert generations(tmp_path / "store") == {"e0": (2, 2), "e1": (3, 3), "e2": (1, 1)}
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20, retain=1)) as store:
        update(store, "e2")
        store.commit()
    assert generations(tmp_path / "store") == {"e0": (2, 2), "e1": (3, 3), "e2": (5, 5)}


def test_a_group_that_was_not_written_keeps_its_generation(tmp_path: Path) -> None:
    schema = RecordSchema("dense", NUMEL, placement=Placement.DIRECT)
    memory = Arena(3 * SLOT_BYTES, HugePages.OFF)
    buffers = [Buffer(memory, [(i * SLOT_BYTES, SLOT_BYTES)], 4 * NUMEL) for i in range(3)]
    weights, moments = {Group.WEIGHTS: buffers[:1]}, {Group.MOMENTS: buffers[1:]}
    with ParameterStore.create(tmp_path / "store", [schema], StoreConfig(host_budget=1 << 20)) as store:
        store.register("d", "dense")
        for groups in (weights | moments, weights, moments, weights):
            store.core.write_through("d", groups, step=0)
            store.commit()
    assert generations(tmp_path / "store") == {"d": (4, 3)}


def test_only_the_first_write_back_after_a_commit_takes_a_new_slot(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store:
        live: LiveRecord = store.core.record("e0")
        places = []
        for commit in (False, False, True, False):
            update(store, "e0")
            store.commit() if commit else store.core.cache.clean()
            places.append([live.slot(group) for group in COMMITTED_GROUPS])
        assert places[0] == places[1] == places[2] != places[3]
        assert live.slot(Group.GRADIENTS) is None
        left = places[2][Group.WEIGHTS]
        assert left.extent.shared(left.number)
        store.commit()
        assert not left.extent.shared(left.number)
