"""Weights of frozen records where a mapping of their file has them: here the page cache stands in for an NVDIMM."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest_store import flip_bit, weights
from effort import share
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from tierstore.capabilities import Capability, Finding
from tierstore.errors import CapabilityError, ChecksumError, ConfigError
from tierstore.links import LinkConfig
from tierstore.store import (
    Group,
    IoBackendName,
    IoConfig,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    StripeConfig,
    Training,
    WeightFormat,
)
from tierstore.store import mapped as mapped_module
from tierstore.store.config import StoreAccess

NUMEL = 3000  # 6,000 bytes in bf16: a slot of two pages, the second with a gap
BASE = RecordSchema("base", NUMEL, WeightFormat.BF16, training=Training.FROZEN)
PAIR = RecordSchema("pair", 1024)
IO = IoConfig(backend=IoBackendName.PMEM, mapped_weights=Capability.ON, huge_pages=Capability.OFF)
CONFIG = StoreConfig(host_budget=1 << 20, io=IO)


def made(path: Path, config: StoreConfig = CONFIG) -> ParameterStore:
    """Frozen ``e0`` to ``e3`` and trained ``p0``; committed."""
    store = ParameterStore.create(path, [BASE, PAIR], config)
    store.register_many(NewRecord(key, "base", weight=weight) for key, weight in weights(4, NUMEL).items())
    store.register("p0", "pair")
    store.commit()
    return store


def lease(store: ParameterStore, key: str) -> np.ndarray | None:
    """The bytes of a mapped record after its check; None if it is not mapped."""
    mapped, record = store.core.mapped, store.core.record(key)
    found = mapped.find(record)
    if found is None:
        return None
    try:
        store.core.wait([found.checked])
    except BaseException:
        mapped.forget(record)
        raise
    mapped.count(found)
    return found.weights.array()


def copied(store: ParameterStore, key: str) -> bytes:
    """The bytes of the weights, read into memory."""
    return b"".join(section.array().tobytes() for section in store.core.sections(key)[:1])


def flip(store: ParameterStore, key: str) -> None:
    """Flips a bit of the weights on disk."""
    slot = store.core.record(key).slot(Group.WEIGHTS)
    flip_bit(Path(slot.extent.path), 8 * (slot.number * slot.extent.slot_bytes + 5000))


def test_by_hand(tmp_path: Path) -> None:
    """Two leases of 6,000 bytes, the second without a check; the host cache decides nothing."""
    made(tmp_path / "s").close()
    with ParameterStore.open(tmp_path / "s", CONFIG, access=StoreAccess.READ) as store:
        before = store.core.engine.stats()
        expected = (np.frombuffer(weights(4, NUMEL)["e2"].tobytes(), np.uint32) >> 16).astype(np.uint16)
        first = lease(store, "e2")
        assert np.abs(first.view(np.uint16).astype(int) - expected).max() <= 1, "rounded, not cut"
        again = lease(store, "e2")
        assert again.ctypes.data == first.ctypes.data
        after, stats = store.core.engine.stats(), store.core.cache.residency.stats()
        assert (store.core.mapped.leases, store.core.mapped.leased_bytes) == (2, 12_000)
        assert (stats.hits, stats.misses, after["reads"] - before["reads"]) == (0, 0, 0)
        assert after["compute_ops"] - before["compute_ops"] == 1, "checked once"
        assert lease(store, "p0") is None, "trained"
        assert "frozen weights: in mapped files where the CPU computes in place (files are mapped)" in (
            store.status().effective
        )


@settings(deadline=None, max_examples=share(25))
@given(
    numel=st.integers(1, 5000),
    weight_format=st.sampled_from([WeightFormat.BF16, WeightFormat.FP32]),
    count=st.integers(1, 12),
    later=st.integers(0, 12),
    stripes=st.integers(0, 2),
)
def test_mapped_bytes_are_those_that_are_read(
    numel: int, weight_format: WeightFormat, count: int, later: int, stripes: int
) -> None:
    """In whatever slot of whatever file; also of records that are added once files are mapped, which grow."""
    schema = RecordSchema("base", numel, weight_format, training=Training.FROZEN)
    content = weights(count + later, numel)
    with tempfile.TemporaryDirectory() as root:
        stripe = StripeConfig(directories=tuple(Path(root) / f"d{i}" for i in range(stripes)))
        config = replace(CONFIG, stripe=stripe)
        with ParameterStore.create(Path(root) / "s", [schema], config) as store:
            for keys in (list(content)[:count], list(content)[count:]):
                store.register_many(NewRecord(key, "base", weight=content[key]) for key in keys)
                assert all(lease(store, key) is None for key in keys), "not in a commit yet"
                store.commit()
                for key in content if keys else ():
                    if key in store.keys:
                        found = lease(store, key)
                        assert found.tobytes() == copied(store, key)


def test_corruption_is_found_on_the_first_lease(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        flip(store, "e1")
        path = str(tmp_path / "s" / "extents" / "base.weights")
        for _ in range(2):  # what failed is checked again
            with refuses(ChecksumError, "record 'e1', section weight", path):
                lease(store, "e1")
        assert lease(store, "e0") is not None
        flip(store, "e1")
        assert lease(store, "e1") is not None
        assert store.core.mapped.leases == 2


def test_a_file_that_was_cut_short_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    made(tmp_path / "s").close()
    with ParameterStore.open(tmp_path / "s", CONFIG) as store:
        slot = store.core.record("e3").slot(Group.WEIGHTS)
        assert lease(store, "e0") is not None, "maps the whole file"
        with open(slot.extent.path, "r+b") as file:
            file.truncate(slot.number * slot.extent.slot_bytes)
        with refuses(OSError, "record 'e3', section weight"):
            lease(store, "e3")


def test_a_lease_outlives_its_store(tmp_path: Path) -> None:
    store = made(tmp_path / "s")
    found, expected = lease(store, "e0"), copied(store, "e0")
    store.close()
    (tmp_path / "s" / "extents" / "base.weights").unlink()
    assert found.tobytes() == expected
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "base.weights" in line]
    assert {line.split()[1] for line in mapped} == {"r--s"}, "only the read-only mapping is left"


def test_where_records_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "s").close()
    link = LinkConfig(bandwidth=1 << 30)
    auto = replace(IO, mapped_weights=Capability.AUTO)

    def mapped(config: StoreConfig) -> bool:
        with ParameterStore.open(tmp_path / "s", config) as store:
            return lease(store, "e0") is not None

    dax = Finding(True, "it is mounted with dax")
    assert not mapped(replace(CONFIG, io=replace(IO, mapped_weights=Capability.OFF)))
    assert not mapped(replace(CONFIG, io=replace(auto, backend=IoBackendName.THREADS)))
    monkeypatch.setattr(mapped_module, "probe_dax", lambda path: Finding(False, "not mounted with dax"))
    assert not mapped(replace(CONFIG, io=auto))
    monkeypatch.setattr(mapped_module, "probe_dax", lambda path: dax)
    assert mapped(replace(CONFIG, io=auto))
    assert not mapped(replace(CONFIG, io=auto, disk=link))
    with refuses(CapabilityError, "io.mapped_weights is set to on", "limited link"):
        mapped(replace(CONFIG, disk=link))
    with refuses(ConfigError, "io.mapped_weights: on needs io.backend = pmem, got auto"):
        IoConfig(mapped_weights=Capability.ON)
