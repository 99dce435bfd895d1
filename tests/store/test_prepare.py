"""Commits of several ranks: a prepared commit can be undone until it is acknowledged."""

from pathlib import Path

import pytest
from conftest_store import small_store, step_all

from tierstore.errors import StoreError
from tierstore.store import OpenAt, ParameterStore, StoreConfig
from tierstore.store.committing import Keep
from tierstore.store.index.database import Index
from tierstore.store.reading import read_states

NUMEL = 3000


def content(path: Path, at: OpenAt = OpenAt.LAST) -> tuple[int, bytes]:
    with ParameterStore.open(path, StoreConfig(host_budget=1 << 20), at=at) as store:
        assert not store.verify().failures
        return store.records_crc32c(), store.last_commit.state["n"]


def test_the_commit_before_a_prepared_one_is_there_until_acknowledged(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        step_all(store, 1e-2, 1)
        store.commit({"n": b"1"})
        first = store.records_crc32c()
        step_all(store, 1e-2, 2)
        store.core.committer.commit({"n": b"2"}, keep=Keep.PREVIOUS)
        second = store.records_crc32c()
    assert first != second
    assert read_states(tmp_path / "s", "n") == {OpenAt.LAST: b"2", OpenAt.PREVIOUS: b"1"}
    assert content(tmp_path / "s") == (second, b"2")
    assert content(tmp_path / "s", OpenAt.PREVIOUS) == (first, b"1")
    # Undone for good: it is the last commit now, and there is none before it.
    assert content(tmp_path / "s") == (first, b"1")
    assert read_states(tmp_path / "s", "n") == {OpenAt.LAST: b"1"}
    with pytest.raises(StoreError, match="no prepared commit"):
        content(tmp_path / "s", OpenAt.PREVIOUS)


def test_after_going_back_training_goes_on_as_if_never_ahead(tmp_path: Path) -> None:
    crcs = []
    for name, ahead in (("straight", False), ("back", True)):
        path = tmp_path / name
        with small_store(path) as store:
            step_all(store, 1e-2, 1)
            store.core.committer.commit({"n": b"1"}, keep=Keep.PREVIOUS)
            store.core.committer.acknowledge()
            if ahead:
                step_all(store, 1e-2, 7)
                store.core.committer.commit({"n": b"2"}, keep=Keep.PREVIOUS)
        at = OpenAt.PREVIOUS if ahead else OpenAt.LAST
        with ParameterStore.open(path, StoreConfig(host_budget=1 << 20), at=at) as store:
            step_all(store, 1e-2, 2)
            store.core.committer.commit({"n": b"2"}, keep=Keep.PREVIOUS)
            store.core.committer.acknowledge()
            step_all(store, 1e-2, 3)
            store.commit()
            crcs.append(store.records_crc32c())
        assert content(path)[0] == crcs[-1]
    assert crcs[0] == crcs[1]


def test_acknowledging_frees_the_slots_and_survives_reopening(tmp_path: Path) -> None:
    """A loop of prepare and acknowledge stays within two copies: an extent that had to grow would show."""
    path = tmp_path / "s"
    with small_store(path) as store:
        sizes = None
        for number in range(6):
            step_all(store, 1e-2, number)
            store.core.committer.commit({"n": b"%d" % number}, keep=Keep.PREVIOUS)
            store.core.committer.acknowledge()
            store.core.committer.acknowledge()  # again is nothing
            now = {file.name: file.stat().st_size for file in (path / "extents").iterdir()}
            assert sizes in (None, now)
            sizes = now
        crc = store.records_crc32c()
    assert content(path) == (crc, b"5")
    assert set(read_states(path, "n")) == {OpenAt.LAST}


def test_a_second_prepare_needs_the_acknowledgement_of_the_first(tmp_path: Path) -> None:
    with small_store(tmp_path / "s") as store:
        step_all(store, 1e-2, 1)
        store.core.committer.commit({"n": b"1"}, keep=Keep.PREVIOUS)
        step_all(store, 1e-2, 2)
        with pytest.raises(StoreError, match="not acknowledged"):
            store.core.committer.commit({"n": b"2"}, keep=Keep.PREVIOUS)
        store.core.committer.acknowledge()
        store.core.committer.commit({"n": b"2"}, keep=Keep.PREVIOUS)
        # An ordinary commit acknowledges by itself.
        step_all(store, 1e-2, 3)
        store.commit({"n": b"3"})
    assert set(read_states(tmp_path / "s", "n")) == {OpenAt.LAST}


def test_named_snapshots_and_the_previous_commit_do_not_count_each_other(tmp_path: Path) -> None:
    with small_store(tmp_path / "s", retain=1) as store:
        for number in range(3):
            step_all(store, 1e-2, number)
            store.core.committer.commit({"n": b"%d" % number}, snapshot=f"named-{number}", keep=Keep.PREVIOUS)
            before = [f"named-{number - 1}"] if number else []
            assert [name for name in store.last_commit.snapshots if name.startswith("named")] == [
                *before,
                f"named-{number}",
            ]
            store.core.committer.acknowledge()
            assert store.last_commit.snapshots == [f"named-{number}"]
        with pytest.raises(ValueError, match="is reserved"):
            store.commit(snapshot=".previous")
    with ParameterStore.open(tmp_path / "s", StoreConfig(host_budget=1 << 20, retain=1)) as store:
        assert list(store.last_commit.snapshots) == ["named-2"]
        assert not store.verify().failures


def test_a_first_prepare_has_nothing_before_it(tmp_path: Path) -> None:
    from tierstore.store import RecordSchema

    with ParameterStore.create(
        tmp_path / "s", [RecordSchema("expert", 64)], StoreConfig(host_budget=1 << 20)
    ) as s:
        s.register("e0", "expert")
        s.core.committer.commit({"n": b"0"}, keep=Keep.PREVIOUS)
        s.core.committer.acknowledge()
    assert read_states(tmp_path / "s", "n") == {OpenAt.LAST: b"0"}


def test_undoing_a_prepared_snapshot_keeps_the_one_whose_place_it_took(tmp_path: Path) -> None:
    path, config = tmp_path / "s", StoreConfig(host_budget=1 << 20, retain=1)
    with small_store(path, retain=1) as store:
        step_all(store, 1e-2, 1)
        store.core.committer.commit({"n": b"1"}, snapshot="a", keep=Keep.PREVIOUS)
        store.core.committer.acknowledge()
        step_all(store, 1e-2, 2)
        store.core.committer.commit({"n": b"2"}, snapshot="b", keep=Keep.PREVIOUS)
    with ParameterStore.open(path, config, at=OpenAt.PREVIOUS) as store:
        assert store.last_commit.snapshots == ["a"]
        assert not store.verify().failures
    # A commit without a snapshot lets none go, even where fewer are to be kept.
    with ParameterStore.open(path, StoreConfig(host_budget=1 << 20)) as store:
        step_all(store, 1e-2, 3)
        store.commit()
        store.core.committer.commit({"n": b"3"}, keep=Keep.PREVIOUS)
        store.core.committer.acknowledge()
        assert store.last_commit.snapshots == ["a"]


def test_states_are_read_without_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who resumes asks for the step first, and reads the records once, when it opens the store."""
    with small_store(tmp_path / "s") as store:
        store.commit({"n": b"1"})
    with monkeypatch.context() as patch:
        patch.setattr(Index, "read_commit", None)
        assert read_states(tmp_path / "s", "n") == {OpenAt.LAST: b"1"}
        assert read_states(tmp_path / "s", "of another name") == {}
