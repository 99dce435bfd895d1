"""Garbage: all that a crash leaves goes, all that a commit refers to stays, and what is not known is left alone."""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from command_line import done, object_of, refused
from conftest_store import small_store, step_all
from effort import with_fixtures
from hypothesis import given
from hypothesis import strategies as st

from tierstore import _native
from tierstore.errors import StoreFormatError, StoreInUseError, StoreMissingError
from tierstore.store import ParameterStore, StoreConfig, StripeConfig
from tierstore.store.committing import Keep
from tierstore.store.disk.home import building
from tierstore.store.gc import GcReport, Mode, collect

NUMEL = 3000
COUNT = 6
SLOTS = 3 * 12288  # weights and moments of one record
CONFIG = StoreConfig(host_budget=1 << 20, retain=1)


def disk_bytes(path: Path) -> int:
    """All but leases: who holds one writes his pid."""
    return sum(file.lstat().st_blocks * 512 for file in (path, *path.rglob("*")) if file.name != "lease")


def extent_bytes(*stores: Path) -> int:
    """Blocks of all extents, but for those in which a file system keeps a list of the others."""
    files = [file for store in stores for file in (store / "extents").iterdir()]
    return sum(file.stat().st_blocks * 512 // 12288 * 12288 for file in files)


def image(path: Path) -> dict[str, bytes]:
    """Every file but leases, which say who looked last."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name != "lease"
    }


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A store that was copied while it was at work: write-backs that no commit refers to, a scratch file."""
    store = small_store(tmp_path / "run", count=COUNT, numel=NUMEL, budget=200_000, retain=1)
    with store:
        store.commit(snapshot="kept")
        step_all(store, 1e-2, 0)
        store.commit()
        step_all(store, 1e-2, 1)
        store.core.committer.begin()
        store.core.wait(store.core.committer.writes)
        shutil.copytree(tmp_path / "run", tmp_path / "crashed")
    (tmp_path / "crashed" / "scratch" / "expert.gradients").write_bytes(bytes(8192))
    (tmp_path / "crashed" / "tierstore.json.new").write_text("{")
    return tmp_path / "crashed"


def content(path: Path) -> tuple[int, int, list[str]]:
    with ParameterStore.open(path, CONFIG) as store:
        report = store.verify()
        assert report.failures == []
        return store.last_commit.generation, store.records_crc32c(), store.last_commit.snapshots


def paths(report: GcReport) -> set[str]:
    return {item.path.name for item in report.garbage}


def test_a_crash_leaves_nothing_behind(crashed: Path) -> None:
    """Three copies were reserved; two are in use, the last commit's and the snapshot's."""
    expected = content(crashed_copy := Path(shutil.copytree(crashed, crashed.with_name("copy"))))
    shutil.rmtree(crashed_copy)
    before = disk_bytes(crashed)
    report = collect(crashed, Mode.REMOVE)
    assert paths(report) == {"expert.weights", "expert.moments", "expert.gradients", "tierstore.json.new"}
    assert report.left == []
    assert report.nbytes == before - disk_bytes(crashed)
    assert extent_bytes(crashed) == 2 * COUNT * SLOTS
    again = collect(crashed, Mode.REMOVE)
    assert (again.garbage, again.left) == ([], []), "nothing is left for a second time"
    assert content(crashed) == expected
    with ParameterStore.open(crashed, CONFIG) as store:  # and it goes on
        for seed in range(4):
            step_all(store, 1e-2, seed)
            store.commit(snapshot=f"s{seed}")
        assert store.verify().failures == []


def test_a_dry_run_shows_the_same_and_changes_nothing(crashed: Path) -> None:
    before = image(crashed)
    shown = collect(crashed, Mode.DRY_RUN)
    assert image(crashed) == before
    assert shown == collect(crashed, Mode.REMOVE)


def test_a_store_in_use_is_refused(crashed: Path) -> None:
    with ParameterStore.open(crashed, CONFIG):
        before = image(crashed)
        with pytest.raises(StoreInUseError, match=str(os.getpid())):
            collect(crashed, Mode.REMOVE)
        assert image(crashed) == before


def test_what_is_not_known_is_left_alone(crashed: Path) -> None:
    (crashed / "notes.txt").write_text("mine")
    (crashed / "extents" / "expert.weights.bak").write_bytes(b"mine too")
    (crashed / "scratch" / "directory").mkdir()
    report = collect(crashed, Mode.REMOVE)
    assert len(report.left) == 3
    assert (crashed / "notes.txt").read_text() == "mine"
    assert (crashed / "extents" / "expert.weights.bak").exists()
    assert (crashed / "scratch" / "directory").exists()


def test_no_store_and_a_truncated_one(tmp_path: Path, crashed: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    for path in (tmp_path / "other", tmp_path / "missing"):
        with pytest.raises(StoreMissingError, match="no store here"):
            collect(path, Mode.REMOVE)
    assert (tmp_path / "other" / "thesis.tex").exists()
    os.truncate(crashed / "extents" / "expert.weights", 4096)
    with pytest.raises(StoreFormatError, match="truncated"):
        collect(crashed, Mode.REMOVE)


def test_an_interrupted_creation_goes_whole(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    (tmp_path / "store" / "tierstore.json").rename(tmp_path / "store" / "tierstore.json.new")
    lease = 4096
    shown = collect(tmp_path / "store", Mode.DRY_RUN).nbytes
    assert 0 <= shown - disk_bytes(tmp_path / "store") <= lease
    collect(tmp_path / "store", Mode.REMOVE)
    assert not (tmp_path / "store").exists()


def test_several_ranks(tmp_path: Path, crashed: Path) -> None:
    """One rank crashed, one is as it should be, one was being created, one is somebody else's."""
    job = tmp_path / "job"
    job.mkdir()
    crashed.rename(job / "rank-0000")
    small_store(job / "rank-0001").close()
    collect(job / "rank-0001", Mode.REMOVE)
    small_store(job / "rank-0002").close()
    (job / "rank-0002" / "tierstore.json").unlink()
    (job / "rank-0003").mkdir()
    (job / "rank-0003" / "mine").write_text("mine")
    report = collect(job, Mode.REMOVE)
    assert paths(report) == {
        "expert.weights",
        "expert.moments",
        "expert.gradients",
        "tierstore.json.new",
        "rank-0002",
    }
    assert len(report.left) == 1
    assert "rank-0003" in report.left[0]
    assert not (job / "rank-0002").exists()
    assert (job / "rank-0003" / "mine").exists()
    assert content(job / "rank-0000")[2] == ["kept"]


def test_a_prepared_commit_stays(tmp_path: Path) -> None:
    with small_store(tmp_path / "store", count=COUNT, numel=NUMEL) as store:
        step_all(store, 1e-2, 0)
        store.core.committer.commit(keep=Keep.PREVIOUS)
    report = collect(tmp_path / "store", Mode.REMOVE)
    assert any("prepared commit" in reason for reason in report.left)
    assert extent_bytes(tmp_path / "store") == 2 * COUNT * SLOTS


def test_an_interrupted_reshard(tmp_path: Path, crashed: Path) -> None:
    partial = tmp_path / "new.partial"
    shutil.copytree(crashed, partial / "rank-0000")
    with building(partial), pytest.raises(StoreInUseError, match="building"):
        collect(tmp_path / "new", Mode.REMOVE)
    assert collect(tmp_path / "new", Mode.DRY_RUN).nbytes > 0
    (partial / "mine").write_text("mine")
    assert collect(tmp_path / "new", Mode.REMOVE).garbage == []
    assert (partial / "mine").exists()
    (partial / "mine").unlink()
    assert paths(collect(tmp_path / "new", Mode.REMOVE)) == {"new.partial"}
    assert not partial.exists()


def test_several_directories(tmp_path: Path) -> None:
    further = tmp_path / "drive"
    config = StoreConfig(host_budget=1 << 20, retain=3, stripe=StripeConfig(directories=(further,)))
    small_store(tmp_path / "store", count=COUNT, numel=NUMEL).close()
    with ParameterStore.open(tmp_path / "store", config) as store:
        step_all(store, 1e-2, 0)
        store.commit()
        crc = store.records_crc32c()
    files = [*(tmp_path / "store" / "extents").iterdir(), *(further / "extents").iterdir()]
    report = collect(tmp_path / "store", Mode.REMOVE)
    assert {item.path for item in report.garbage} == set(files)
    assert extent_bytes(tmp_path / "store", further) == COUNT * SLOTS
    with ParameterStore.open(tmp_path / "store", config) as store:
        assert (store.verify().failures, store.records_crc32c()) == ([], crc)
    with pytest.raises(StoreFormatError, match="directory 1 of the store"):
        collect(further, Mode.REMOVE)
    (further / "tierstore.json").unlink()
    assert any("directory 1" in reason for reason in collect(tmp_path / "store", Mode.REMOVE).left)


class _KilledError(BaseException):
    """What a kill looks like from inside."""


def test_killed_at_any_moment_the_next_one_finishes(
    tmp_path: Path, crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job"
    job.mkdir()
    small_store(job / "rank-0001").close()
    (job / "rank-0001" / "tierstore.json").unlink()
    crashed.rename(job / "rank-0000")
    for moment in itertools.count():
        path = Path(shutil.copytree(job, tmp_path / f"job{moment}"))
        left = [moment]

        def counted(call: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
            def killed(*arguments: object, **options: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    raise _KilledError
                return call(*arguments, **options)

            return killed

        with monkeypatch.context() as patch:
            for place, name in ((os, "truncate"), (os, "unlink"), (os, "rmdir"), (_native.File, "punch")):
                patch.setattr(place, name, counted(getattr(place, name)))
            with contextlib.suppress(_KilledError):
                collect(path, Mode.REMOVE)
        finished = left[0] >= 0
        collect(path, Mode.REMOVE)
        assert collect(path, Mode.REMOVE).garbage == []
        assert {child.name for child in path.iterdir()} == {"rank-0000"}
        assert content(path / "rank-0000")[2] == ["kept"]
        shutil.rmtree(path)
        if finished:
            break
    assert moment > 5


@with_fixtures(8)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, COUNT - 1), max_size=4), st.booleans()), min_size=1, max_size=6
    )
)
def test_every_commit_that_counts_survives(tmp_path: Path, steps: list[tuple[list[int], bool]]) -> None:
    """Any history of updates and snapshots: what verify reads afterwards is all there, and takes just its slots."""
    path = tmp_path / "any"
    shutil.rmtree(path, ignore_errors=True)
    rng = np.random.default_rng(0)
    with small_store(path, count=COUNT, numel=NUMEL, budget=150_000, retain=2) as store:
        for number, (touched, snapshot) in enumerate(steps):
            gradients = {f"e{i}": rng.standard_normal(NUMEL).astype(np.float32) for i in touched}
            store.update(gradients, lr=1e-2)
            store.commit(snapshot=f"s{number}" if snapshot else None)
        expected = store.last_commit.generation, store.records_crc32c(), store.last_commit.snapshots
        used = sum(
            extent.slot_bytes * sum(extent.shared(slot) for slot in range(extent.slots))
            for extent in store.core.extents.files
        )
    collect(path, Mode.REMOVE)
    assert extent_bytes(path) == used
    assert content(path) == expected


def test_the_command(crashed: Path) -> None:
    assert "would be freed" in done("gc", crashed, "--dry-run").stdout
    shown = object_of("gc", crashed)
    assert shown["freed_bytes"] > 0
    assert {Path(item["path"]).name for item in shown["garbage"]} >= {"expert.weights", "expert.gradients"}
    with ParameterStore.open(crashed, CONFIG):
        said = refused("gc", crashed)
    assert len(said.splitlines()) == 1
    assert "open in another process" in said


@pytest.mark.parametrize("way", [".", "..", "extents/.."])
def test_from_within_the_store(crashed: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    expected = collect(crashed, Mode.DRY_RUN)
    assert expected.nbytes > 0
    partial = crashed.with_name(f"{crashed.name}.partial")
    shutil.copytree(crashed, partial)
    monkeypatch.chdir(crashed / "index" if way == ".." else crashed)
    assert collect(Path(way), Mode.REMOVE).nbytes > expected.nbytes
    assert not partial.exists()
