"""What a lease shows: views that are always there, whatever the cache did before, and clear refusals."""

from pathlib import Path

import numpy as np
import pytest
from conftest_store import small_store, weights

from tierstore.store import Group, ParameterStore, RecordSchema, StoreConfig, verify_store

NUMEL = 3 * 64 * 1024  # a weight section is several frames of 64 KiB


def scattered(store: ParameterStore) -> bool:
    """Whether the weights of ``b`` lie in the host cache in several pieces."""
    (section,) = store.core.cache.sections(store.core.record("b").entry(Group.WEIGHTS))
    return not section.contiguous


def test_a_view_is_there_wherever_its_frames_lie(tmp_path: Path) -> None:
    """Frames that two small records have left, with another one's between them, hold a large one in pieces."""
    small = RecordSchema("small", 16 * 1024)
    large = RecordSchema("large", NUMEL)
    config = StoreConfig(host_budget=16 * NUMEL)
    weight = np.arange(NUMEL, dtype=np.float32)
    with ParameterStore.create(tmp_path / "store", [small, large], config) as store:
        for number in range(40):
            store.register(f"a{number}", "small")
        store.register("b", "large", weight=weight)
        store.commit()
        pieces = False
        for number in range(39):
            held = store.fetch([f"a{number}", f"a{number + 1}"], [Group.WEIGHTS, Group.MOMENTS])
            with store.fetch(["b"]) as lease:
                view = lease["b"].view("weight")
                assert not view.flags.writeable
                assert (view == weight).all()
                assert lease["b"].view("weight") is view, "made once"
                pieces |= scattered(store)
            held.release()
            store.core.cache.drop([store.core.record("b").entry(Group.WEIGHTS)])
            store.core.cache.residency.set_stored(store.core.record("b").number, 0b011)
        assert pieces, "the test wants a record in several pieces"


def test_a_view_in_one_piece_is_the_caches_own_memory(tmp_path: Path) -> None:
    with small_store(tmp_path / "store") as store, store.fetch(["e0"]) as lease:
        (section,) = store.core.cache.sections(store.core.record("e0").entry(Group.WEIGHTS))
        assert section.contiguous
        assert np.shares_memory(lease["e0"].view("weight"), section.array())
        copy = lease["e0"].copy("weight")
        copy[:] = 0
        assert (lease["e0"].view("weight") == weights(4, 3000)["e0"]).all()
        with pytest.raises(KeyError, match="exp_avg"):
            lease["e0"].view("exp_avg")


def test_a_store_is_verified_by_the_name_of_its_directory(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    assert verify_store(str(tmp_path / "store")) == verify_store(tmp_path / "store")
