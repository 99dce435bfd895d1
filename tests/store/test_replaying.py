"""Weights of records that have missed steps, in a store that is opened to read: replayed in memory, and nowhere else."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from conftest_store import flip_bit, small_store, weights
from effort import with_fixtures
from hypothesis import given
from hypothesis import strategies as st
from test_reading import fingerprint

from tierstore._native import Priority
from tierstore.errors import BudgetError, ChecksumError, StoreError
from tierstore.store import Group, Inactive, MomentFormat, ParameterStore, StoreConfig, WeightFormat
from tierstore.store.config import StoreAccess
from tierstore.store.disk.extents import scratch_buffers
from tierstore.store.opening import minimum_host_budget
from tierstore.store.optimizer import replay_scratch_bytes
from tierstore.store.reading import read_summary
from tierstore.trace.replay import replay

READ = StoreAccess.READ
NUMEL, COUNT = 3000, 6
Bytes = Mapping[str, npt.NDArray[np.uint8]]


def behind(path: Path, steps: int = 5, **options: object) -> dict[str, int]:
    """A store at ``path`` of which record e<i> was stepped in steps 1 to i alone; how many steps each has missed."""
    with small_store(path, count=COUNT, numel=NUMEL, **options) as store:  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            keys = [f"e{i}" for i in range(COUNT) if i >= step]
            drawn = np.random.default_rng(step).standard_normal((len(keys), NUMEL)).astype(np.float32)
            store.update(dict(zip(keys, drawn, strict=True)), lr=0.01 * step)
        store.commit()
        return {key: steps - store.info(key).step for key in store.keys}


def read_weights(path: Path, **options: object) -> Bytes:
    """The first section of each record's weights, bit for bit, read by an opening of its own."""
    found = {}
    with ParameterStore.open(path, **options) as store:  # type: ignore[arg-type]
        for key in store.keys:
            with store.fetch([key]) as lease:
                found[key] = lease[key].copy(lease[key].sections[0]).view(np.uint8)
    return found


@pytest.mark.parametrize("moments", MomentFormat)
@pytest.mark.parametrize("weight_format", [WeightFormat.FP32, WeightFormat.SPLIT_BF16])
def test_the_bits_of_a_store_that_has_caught_up(
    tmp_path: Path, weight_format: WeightFormat, moments: MomentFormat
) -> None:
    missed = behind(tmp_path / "store", weight_format=weight_format, moments=moments)
    assert missed == {"e0": 5, "e1": 4, "e2": 3, "e3": 2, "e4": 1, "e5": 0}
    before = fingerprint(tmp_path / "store")
    schema = read_summary(tmp_path / "store").schemas[0]
    least = minimum_host_budget([schema], access=READ) + replay_scratch_bytes(schema)
    found = [
        read_weights(tmp_path / "store", config=StoreConfig(host_budget=budget), access=READ)
        for budget in (least, 1 << 20)
    ]
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20), access=READ) as store:
        crc = store.records_crc32c()
        with store.fetch(store.keys):
            assert store.records_crc32c() == crc, "what is in the cache is not replayed again"
        record = store.core.records.live("e4")
        sections = scratch_buffers(record.schema.layout(Group.WEIGHTS))
        store.core.wait([record.read(Group.WEIGHTS, sections, (), Priority.DEMAND)])
        on_disk = sections[0].array().copy()
    assert fingerprint(tmp_path / "store") == before
    expected = read_weights(tmp_path / "store", config=StoreConfig(host_budget=1 << 20))
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20)) as store:
        assert store.records_crc32c() == crc
    for key, weight in expected.items():
        assert all(np.array_equal(each[key], weight) for each in found), key
    assert not np.array_equal(on_disk, expected["e4"]), "there was something to replay"


def test_it_is_read_whole_each_time_it_comes_in_and_counted_so(tmp_path: Path) -> None:
    """fp32: weights 12,288 bytes with padding, moments twice as many. With one frame every fetch reads: five records
    have missed steps, and are 36,864 bytes each; the sixth is its weights. Fetched twice: 2 x (5 x 36,864 + 12,288).
    """
    behind(tmp_path / "store")
    summary = read_summary(tmp_path / "store")
    schema = summary.schemas[0]
    assert (summary.records, summary.missed) == ({"expert": 6}, {"expert": 5})
    assert replay_scratch_bytes(schema) == 2 * 24_576
    least = 12_288 + 2 * 24_576
    trace = tmp_path / "trace"
    with ParameterStore.open(
        tmp_path / "store", StoreConfig(host_budget=least), access=READ, trace=trace
    ) as store:
        assert store.core.scratch_bytes == 2 * 24_576
        for key in 2 * store.keys:
            with store.fetch([key]):
                pass
        live = store.core.cache.residency.stats()
        read = store.status().drives[0].read_bytes
    assert (live.misses, live.hits, live.written_bytes) == (12, 0, 0)
    assert live.read_bytes == 2 * (5 * 36_864 + 12_288) == read
    assert replay(trace) == live
    with pytest.raises(BudgetError, match=f"the minimum is {least} bytes"):
        ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=least - 1), access=READ)


def test_kept_weights_are_hits_and_clean(tmp_path: Path) -> None:
    behind(tmp_path / "store")
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20), access=READ) as store:
        for _ in range(3):
            with store.fetch(store.keys):
                pass
        stats = store.core.cache.residency.stats()
        assert (stats.misses, stats.hits) == (6, 12)
        assert not len(store.core.cache.residency.dirty_entries())
        assert {key: store.info(key).step for key in store.keys}["e0"] == 0, "on disk it is behind"


def test_moments_that_are_behind_are_refused(tmp_path: Path) -> None:
    behind(tmp_path / "store")
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20), access=READ) as store:
        with pytest.raises(StoreError, match="record 'e0' has missed steps"):
            store.fetch(["e0"], [Group.MOMENTS])
        with store.fetch(["e5"], [Group.WEIGHTS, Group.MOMENTS]) as lease:
            assert len(lease["e5"].sections) == 3


def test_what_is_skipped_is_not_replayed(tmp_path: Path) -> None:
    behind(tmp_path / "store", inactive=Inactive.SKIP)
    assert read_summary(tmp_path / "store").missed == {}
    found = read_weights(tmp_path / "store", config=StoreConfig(host_budget=12_288), access=READ)
    assert np.array_equal(found["e0"].view(np.float32), weights(COUNT, NUMEL)["e0"])


def test_moments_that_are_damaged_are_named(tmp_path: Path) -> None:
    """The weights alone would be right; what they are caught up with is not."""
    behind(tmp_path / "store")
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20), access=READ) as store:
        slot = store.core.records.live("e2").slot(Group.MOMENTS)
        path, offset = slot.extent.path, slot.number * slot.extent.slot_bytes
    flip_bit(path, 8 * (offset + 100))
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=1 << 20), access=READ) as store:
        with pytest.raises(ChecksumError, match="'e2', section exp_avg"):
            store.fetch(["e2"])
        for key in ("e0", "e1", "e3"):  # whose replays take over its scratch
            with store.fetch([key]):
                pass


@with_fixtures(20)
@given(
    order=st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=30),
    frames=st.integers(1, COUNT),
    ahead=st.integers(0, 2),
)
def test_any_order_and_any_budget_give_the_same_bits(
    fast_path: Path, order: list[int], frames: int, ahead: int
) -> None:
    path = fast_path / "store"
    if not path.exists():
        behind(path)
        config = StoreConfig(host_budget=1 << 20)
        with ParameterStore.open(path, config, access=READ) as store, store.fetch(store.keys) as lease:
            np.savez(fast_path / "expected", **{key: lease[key].copy("weight") for key in lease})
    expected = np.load(fast_path / "expected.npz")
    budget, trace = frames * 12_288 + 2 * 24_576, fast_path / "trace"
    config = StoreConfig(host_budget=budget, lookahead=min(ahead, frames - 1) * 12_288)
    with ParameterStore.open(path, config, access=READ, trace=trace) as store:
        for i, number in enumerate(order):
            with store.fetch([f"e{number}"]) as lease:
                store.prefetch([f"e{n}" for n in order[i + 1 : i + 1 + ahead]])
                assert np.array_equal(lease[f"e{number}"].view("weight"), expected[f"e{number}"])
        live = store.core.cache.residency.stats()
    assert replay(trace) == live
    trace.unlink()
