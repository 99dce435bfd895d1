"""A store that was copied: two with one uuid, of which only one can have the stripe directories."""

import json
import shutil
from pathlib import Path

import pytest
from conftest_store import small_store, step_all

from tierstore.errors import StoreExistsError, StoreFormatError, StoreMissingError
from tierstore.store import ParameterStore, StoreConfig, StripeConfig, verify_store
from tierstore.store.config import StoreAccess
from tierstore.store.disk import drives
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.gc import Mode, collect

NUMEL = 3000
CONFIG = StoreConfig(host_budget=1 << 20)


def config(*directories: Path) -> StoreConfig:
    return StoreConfig(host_budget=1 << 20, stripe=StripeConfig(directories=directories))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """8 records on ``store`` and ``b``."""
    small_store(tmp_path / "store", count=8, stripe=StripeConfig(directories=(tmp_path / "b",))).close()
    return tmp_path / "store"


def work(path: Path, config: StoreConfig = CONFIG) -> int:
    """Three commits that write everything anew; returns the checksum of the last one's content."""
    with ParameterStore.open(path, config) as opened:
        for _ in range(3):
            step_all(opened, 0.1)
            opened.commit()
        return opened.records_crc32c()


def content(path: Path) -> int:
    with ParameterStore.open(path, CONFIG) as opened:
        assert opened.verify().failures == []
        return opened.records_crc32c()


def test_a_copy_of_the_own_directory_alone_is_refused(tmp_path: Path, store: Path) -> None:
    """It would write over slots that the original's last commit refers to."""
    before = content(store)
    shutil.copytree(store, tmp_path / "copy")
    message = f"{tmp_path}/b: belongs to the store in {store}, but the one in {tmp_path}/copy is a copy"
    with pytest.raises(StoreFormatError, match=message):
        ParameterStore.open(tmp_path / "copy", CONFIG)
    with pytest.raises(StoreFormatError, match=message):
        verify_store(tmp_path / "copy")
    assert content(store) == before
    shutil.rmtree(store)  # now there is one again
    assert content(tmp_path / "copy") == before


def test_a_copy_of_all_directories_is_a_store_of_its_own(tmp_path: Path, store: Path) -> None:
    before = content(store)
    shutil.copytree(store, tmp_path / "copy")
    shutil.copytree(tmp_path / "b", tmp_path / "b-copy")
    after = work(tmp_path / "copy", config(tmp_path / "b-copy"))
    assert content(store) == before != after
    assert content(tmp_path / "copy") == after
    # Each has its own from here on: the copy's is not the original's.
    with pytest.raises(StoreFormatError, match=f"b-copy: belongs to the store in {tmp_path}/copy"):
        ParameterStore.open(store, config(tmp_path / "b-copy"))


def test_a_store_that_was_moved_takes_its_directories_along(tmp_path: Path, store: Path) -> None:
    before = content(store)
    store.rename(tmp_path / "moved")
    assert content(tmp_path / "moved") == before
    identity = json.loads((tmp_path / "b" / "tierstore.json").read_text())
    assert (identity["home"], identity["path"]) == (str(tmp_path / "moved"), str(tmp_path / "b"))
    # And what was left, or comes back, in its old place is the copy now.
    shutil.copytree(tmp_path / "moved", store)
    with pytest.raises(StoreFormatError, match=f"b: belongs to the store in {tmp_path}/moved"):
        ParameterStore.open(store, CONFIG)


def test_an_older_copy_does_not_take_a_directory_for_one_that_was_never_added(tmp_path: Path) -> None:
    small_store(tmp_path / "store", count=8).close()
    shutil.copytree(tmp_path / "store", tmp_path / "before")
    after = work(tmp_path / "store", config(tmp_path / "b"))
    with pytest.raises(StoreFormatError, match=f"b: belongs to the store in {tmp_path}/store"):
        ParameterStore.open(tmp_path / "before", config(tmp_path / "b"))
    assert content(tmp_path / "store") == after


def test_a_collection_for_a_copy_leaves_the_originals_slots_alone(tmp_path: Path, store: Path) -> None:
    shutil.copytree(store, tmp_path / "copy")
    after = work(store)
    report = collect(tmp_path / "copy", Mode.REMOVE)
    assert any(f"{tmp_path}/b: belongs to the store in {store}" in reason for reason in report.left)
    assert not any(item.path.is_relative_to(tmp_path / "b") for item in report.garbage)
    assert content(store) == after


def test_a_directory_that_becomes_somebodys_just_before_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found empty, then another store is made there, whole, before the lease is taken."""
    small_store(tmp_path / "store").close()
    found: list[int] = []

    def late(path: Path, *, access: StoreAccess = StoreAccess.WRITE) -> DirectoryLease:
        monkeypatch.undo()
        small_store(tmp_path / "other", stripe=StripeConfig(directories=(path,))).close()
        found.append(content(tmp_path / "other"))
        return DirectoryLease(path, access=access)

    monkeypatch.setattr(drives, "DirectoryLease", late)
    with pytest.raises(StoreExistsError, match="found directory 1 of the store in"):
        ParameterStore.open(tmp_path / "store", config(tmp_path / "b"))
    assert found == [content(tmp_path / "other")]


def test_an_identity_that_goes_before_its_lease_is_missed(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path, *, access: StoreAccess = StoreAccess.WRITE) -> DirectoryLease:
        (path / "tierstore.json").unlink()
        return DirectoryLease(path, access=access)

    monkeypatch.setattr(drives, "DirectoryLease", late)
    with pytest.raises(StoreMissingError, match=r"b: directory 1 of the store in .* is missing"):
        ParameterStore.open(store, CONFIG)
