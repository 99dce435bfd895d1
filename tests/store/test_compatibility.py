"""Stores of format 2, as the first release wrote them, open, verify and hold the same for ever.

``tests/fixtures/store-v2.tar.xz`` is a store of cached records (split bf16) of which some have missed steps, a
DIRECT record, one snapshot and named state; ``store-v2.json`` says what it holds.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.parameter_store import verify_store

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPECTED = json.loads((FIXTURES / "store-v2.json").read_text())
CONFIG = StoreConfig(host_budget=1 << 20, retain=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURES / "store-v2.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    return tmp_path / "store-v2"


def test_it_opens_and_holds_what_it_held(path: Path) -> None:
    with ParameterStore.open(path, CONFIG) as store:
        assert {key: store.info(key).step for key in store.keys} == EXPECTED["steps"]
        assert len(set(EXPECTED["steps"].values())) > 2, "some records have missed steps, and not the same"
        last = store.last_commit
        assert (last.generation, last.snapshots) == (EXPECTED["generation"], EXPECTED["snapshots"])
        assert {name: value.hex() for name, value in last.state.items()} == EXPECTED["state"]
        assert store.records_crc32c() == EXPECTED["records_crc32c"]


def test_it_verifies(path: Path) -> None:
    report = verify_store(path)
    assert report.failures == []
    found = {"records": report.records, "sections": report.sections, "bytes_read": report.bytes_read}
    assert found == {key: EXPECTED[key] for key in found}
    assert report.snapshots == 1


def test_it_goes_on(path: Path) -> None:
    with ParameterStore.open(path, CONFIG) as store:
        store.update({"e3": np.ones(3000, np.float32)}, lr=1e-3)
        store.commit()
        expected = store.records_crc32c()
    with ParameterStore.open(path, CONFIG) as store:
        assert store.last_commit.generation == EXPECTED["generation"] + 1
        assert store.info("e3").step == max(EXPECTED["steps"].values()) + 1
        assert store.records_crc32c() == expected
        assert store.verify().failures == []
