"""A store on several drives: what lies where, and which directories are taken for its own."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from child_process import run_python
from conftest_store import small_store, step_all, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore._native import Link
from tierstore.capabilities import Capability
from tierstore.errors import (
    ConfigError,
    DataError,
    StoreError,
    StoreExistsError,
    StoreFormatError,
    StoreMissingError,
)
from tierstore.links import LinkConfig
from tierstore.machine_profile import IoPoint
from tierstore.store import (
    Group,
    NewRecord,
    ParameterStore,
    RecordSchema,
    StoreConfig,
    StripeConfig,
    WearConfig,
    verify_store,
)
from tierstore.store.disk import drives, extents
from tierstore.store.disk.drives import Drive
from tierstore.store.disk.home import Home
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.index.database import Index

NUMEL = 3000
SLOT_BYTES = sum(RecordSchema("expert", NUMEL).layout(group).slot_bytes for group in COMMITTED_GROUPS)
CONFIG = StoreConfig(host_budget=1 << 20)


def config(*directories: Path, **stripe: tuple[float, ...]) -> StoreConfig:
    return StoreConfig(host_budget=1 << 20, stripe=StripeConfig(directories=directories, **stripe))


def striped(tmp_path: Path, count: int = 8, **stripe: tuple[float, ...]) -> ParameterStore:
    """``count`` records on ``store`` and ``b``."""
    return small_store(
        tmp_path / "store", count=count, stripe=StripeConfig(directories=(tmp_path / "b",), **stripe)
    )


def directories(store: ParameterStore, group: Group = Group.WEIGHTS) -> list[int]:
    """Where each record's group lies."""
    slots = [store.core.records.live(key).slot(group) for key in store.keys]
    return [slot.extent.directory for slot in slots if slot is not None]


# What lies where --------------------------------------------------------------------------------------------


def test_records_are_spread_and_found_again(tmp_path: Path) -> None:
    with striped(tmp_path) as store:
        assert directories(store) == directories(store, Group.MOMENTS) == [0, 1] * 4
        own, other = store.status().drives
        assert (own.path, other.path) == (tmp_path / "store", tmp_path / "b")
        slot_bytes = sum(store.info("e0").schema.layout(group).slot_bytes for group in COMMITTED_GROUPS)
        assert own.used_bytes == other.used_bytes == 4 * slot_bytes
        assert own.reserved_bytes == other.reserved_bytes == 2 * own.used_bytes
        assert own.written_bytes == other.written_bytes == own.used_bytes
        crc = store.records_crc32c()
    for directory in ("store", "b"):
        assert (tmp_path / directory / "extents" / "expert.weights").stat().st_size > 0
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.records_crc32c() == crc
        for key, weight in weights(8, NUMEL).items():
            with store.fetch([key]) as lease:
                assert (lease[key].copy("weight") == weight).all()
    report = verify_store(tmp_path / "store")
    assert (report.failures, report.records) == ([], 8)


@pytest.mark.parametrize("spread", [(), (1.0, 1.0), (5.0, 1.0)])
def test_where_bytes_lie_changes_no_bit_and_no_decision(tmp_path: Path, spread: tuple[float, ...]) -> None:
    """Against a store of one directory, in a budget of three records."""
    found = []
    for name, stripe in [
        ("one", StripeConfig()),
        ("two", StripeConfig(directories=(tmp_path / "b",), weights=spread)),
    ]:
        with small_store(tmp_path / name, count=8, budget=130_000, stripe=stripe) as store:
            for number in range(4):
                step_all(store, 0.01, number)
                store.commit()
            stats = store.core.cache.residency.stats()
            found.append((store.records_crc32c(), stats, store.status().steps))
    assert found[0] == found[1]


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(0.1, 1.0), min_size=2, max_size=4), st.integers(0, 3))
def test_shares_converge_and_each_slot_has_one_place(
    tmp_path_factory: pytest.TempPathFactory, shares: list[float], seed: int
) -> None:
    root = tmp_path_factory.mktemp("drives")
    further = tuple(root / f"d{number}" for number in range(1, len(shares)))
    stripe = StripeConfig(directories=further, weights=tuple(shares))
    with small_store(root / "store", count=24, numel=100, stripe=stripe) as store:
        for number in range(3):
            rng = np.random.default_rng(seed + number)
            chosen = rng.choice(24, 12, replace=False)
            store.update({f"e{i}": np.ones(100, np.float32) for i in chosen}, lr=0.1)
            store.commit()
            for group in COMMITTED_GROUPS:
                slots = {store.core.records.live(key).slot(group) for key in store.keys}
                assert len(slots) == 24
        step_all(store, 0.1)
        store.commit()
        held = directories(store)
        for number, share in enumerate(shares):
            expected = 24 * max(share / sum(shares), 1 / 16 / len(shares))
            assert abs(held.count(number) - expected) <= len(shares) + 1


def test_a_drive_that_slows_down_gets_less_from_the_next_commit_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both at 300 MB/s, then one at a twentieth. A link stands in for it, and times by formula for measured ones."""
    speed = 300_000_000

    def by_formula(drive: Drive) -> tuple[int, int, float]:
        read, written, _ = drive.meter.reading()
        return read, written, drive.link.stats()["busy_s"] if drive.link else (read + written) / speed

    monkeypatch.setattr(Drive, "totals", by_formula)
    stripe = StripeConfig(directories=(tmp_path / "b",), bandwidths=(speed, speed))
    numel = 100_000
    with small_store(tmp_path / "store", count=12, numel=numel, budget=32 << 20, stripe=stripe) as store:
        gradients = {key: np.ones(numel, np.float32) for key in store.keys}
        store.update(gradients, lr=0.1)
        store.commit()
        assert [directories(store).count(number) for number in (0, 1)] == [6, 6]
        slow = store.core._parts.drives[1]
        slow.link = Link(speed / 20)
        slow._seen = (slow._seen[0], 0.0)  # a link that is new has no past
        for extent in slow.extents:
            extent.links = [slow.link]
        counts = []
        for _ in range(4):
            store.update(gradients, lr=0.1)
            store.commit()
            counts.append(directories(store).count(1))
        crc = store.records_crc32c()
        # The first commit measured it, and what follows feels it.
        assert counts[0] == 6
        assert max(counts[1:]) < 6
        assert store.status().drives[1].share < 0.4
    with ParameterStore.open(tmp_path / "store", StoreConfig(host_budget=32 << 20)) as store:
        assert store.status().drives[1].share < 0.4  # known from before
        assert store.records_crc32c() == crc


def test_a_drives_own_limit_is_beside_that_of_all(tmp_path: Path) -> None:
    """Neither takes the place of the other."""
    stripe = StripeConfig(directories=(tmp_path / "b",), bandwidths=(0, 10**9))
    limited = replace(CONFIG, stripe=stripe, disk=LinkConfig(bandwidth=10**9))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], limited) as store:
        for number in range(4):
            store.register(f"e{number}", "expert")
        store.commit()
        own, all_of_them = store.core._parts.drives[1].link, store.core.extents.link
        assert own is not None
        assert all_of_them is not None
        assert [link.stats()["nbytes"] for link in (own, all_of_them)] == [2 * SLOT_BYTES, 4 * SLOT_BYTES]


# Space ------------------------------------------------------------------------------------------------------


def test_a_limit_is_kept_and_the_other_drive_takes_the_rest(tmp_path: Path) -> None:
    slot_bytes = SLOT_BYTES
    with striped(tmp_path, limits=(0, 3 * slot_bytes)) as store:
        for number in range(3):
            step_all(store, 0.01, number)
            store.commit()
        own, other = store.status().drives
        assert 0 < other.reserved_bytes <= 3 * slot_bytes
        assert own.reserved_bytes + other.reserved_bytes >= 16 * slot_bytes
        store.core.extents.reserve(4, store.core.live.counts())
        assert store.status().drives[1].reserved_bytes <= 3 * slot_bytes


def test_limits_everywhere_refuse_what_does_not_fit(tmp_path: Path) -> None:
    tight = config(tmp_path / "b", limits=(100_000, 100_000))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], tight) as store:
        with pytest.raises(OSError, match="more bytes are needed on any drive") as caught:
            store.reserve({"expert": 8})
        assert caught.value.filename == str(tmp_path / "store" / "extents" / "expert.moments")
        assert all(drive.reserved_bytes <= 100_000 for drive in store.status().drives)
    assert list(tmp_path.iterdir()) == []


def test_what_was_refused_for_space_is_not_asked_for_again(tmp_path: Path) -> None:
    """Room for three records and their last commit: ten are too many, and then one is not."""
    tight = config(limits=(6 * SLOT_BYTES,))
    with ParameterStore.create(tmp_path / "store", [RecordSchema("expert", NUMEL)], tight) as store:
        with pytest.raises(OSError, match=r"No space left within stripe\.limits"):
            store.register_many([NewRecord(f"e{number}", "expert") for number in range(10)])
        store.register("e0", "expert")
        assert store.commit() == 1
        assert store.keys == ["e0"]


def test_a_drive_is_full_when_it_has_no_room_for_one_slot(tmp_path: Path) -> None:
    """Extents grow by an eighth; where that is too much, by what there is room for."""
    with small_store(tmp_path / "store", count=8, stripe=StripeConfig(limits=(17 * SLOT_BYTES,))) as store:
        weights = store.core.extents.of(0, Group.WEIGHTS)
        free = 8 + 3  # the last commit's share, and of the 17th slots' room, moments' included
        assert len({weights.allocate() for _ in range(free)}) == free
        with pytest.raises(OSError, match="No space left"):
            weights.allocate()
        assert store.status().drives[0].reserved_bytes == 17 * SLOT_BYTES


def test_a_limit_holds_for_what_was_discarded_where_nothing_is_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 slots, of which 24 were given back: they are not taken again without need."""
    monkeypatch.setattr(extents, "_WORTH_BYTES", 0)
    stripe = StripeConfig(directories=(tmp_path / "b",))
    with small_store(tmp_path / "store", count=8, retain=4, stripe=stripe) as store:
        store.commit(snapshot="old")
    limits = StripeConfig(limits=(0, 12 * SLOT_BYTES))
    for discard in (Capability.ON, Capability.OFF):
        chosen = replace(CONFIG, stripe=limits, wear=WearConfig(discard=discard))
        with ParameterStore.open(tmp_path / "store", chosen) as store:
            step_all(store, 0.01, 0)
            store.commit()
            assert [drive.reserved_bytes for drive in store.status().drives] == [12 * SLOT_BYTES] * 2


# Whose directory it is --------------------------------------------------------------------------------------


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    striped(tmp_path).close()
    (tmp_path / "b").rename(tmp_path / "c")
    message = rf"{tmp_path}/b: directory 1 of the store in {tmp_path}/store is missing: mount its drive"
    with pytest.raises(StoreMissingError, match=message):
        ParameterStore.open(tmp_path / "store", CONFIG)
    (tmp_path / "b").mkdir()  # an empty mount point
    with pytest.raises(StoreMissingError, match=message):
        ParameterStore.open(tmp_path / "store", CONFIG)
    # Somewhere else it is found, and remembered from the next commit on.
    with ParameterStore.open(tmp_path / "store", config(tmp_path / "c")) as store:
        step_all(store, 0.01, 1)
        store.commit()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert store.verify().failures == []


def test_swapped_and_foreign_directories_are_named(tmp_path: Path) -> None:
    further = (tmp_path / "b", tmp_path / "c")
    small_store(tmp_path / "store", stripe=StripeConfig(directories=further)).close()
    small_store(tmp_path / "other", stripe=StripeConfig(directories=(tmp_path / "d",))).close()
    refused = [
        (config(*reversed(further)), StoreFormatError, "c: expected directory 1 .* found its directory 2"),
        (
            config(further[0], tmp_path / "d"),
            StoreFormatError,
            "d: expected directory 2 .* store in .*/other",
        ),
        (
            config(*further, tmp_path / "d"),
            StoreExistsError,
            "d: expected an empty or missing directory, found",
        ),
        (config(*further, further[0]), ConfigError, "b is there twice"),
        (config(further[0]), ConfigError, "has 2 stripe directories .* got 1: none can be left out"),
        (config(*further, limits=(1, 2)), ConfigError, "stripe.limits: expected 3, .* got 2"),
    ]
    for wrong, error, message in refused:
        with pytest.raises(error, match=message):
            ParameterStore.open(tmp_path / "store", wrong)
    with pytest.raises(StoreFormatError, match=r"b: directory 1 of the store in .*/store, not a store"):
        ParameterStore.open(tmp_path / "b", CONFIG)
    ParameterStore.open(tmp_path / "store", CONFIG).close()


def test_a_directory_of_another_time_is_no_directory_of_this_one(tmp_path: Path) -> None:
    """Added, copied away, and added anew after the store went back: the copy has the store's uuid and the number."""
    small_store(tmp_path / "store").close()
    shutil.copytree(tmp_path / "store", tmp_path / "before")
    with ParameterStore.open(tmp_path / "store", config(tmp_path / "b")) as store:
        step_all(store, 0.01, 0)
        store.commit()
    (tmp_path / "b").rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "before").rename(tmp_path / "store")
    with ParameterStore.open(tmp_path / "store", config(tmp_path / "b")) as store:
        step_all(store, 0.01, 0)
        store.commit()
    with pytest.raises(StoreFormatError, match=r"old: expected directory 1 .* no longer refers to"):
        ParameterStore.open(tmp_path / "store", config(tmp_path / "old"))


def test_content_of_yours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis").touch()
    with pytest.raises(StoreFormatError, match="found 'thesis'"):
        striped(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["thesis"]


# Adding -----------------------------------------------------------------------------------------------------


def test_a_directory_is_added_by_naming_it(tmp_path: Path) -> None:
    small_store(tmp_path / "store", count=8).close()
    with ParameterStore.open(tmp_path / "store", config(tmp_path / "b")) as store:
        assert set(directories(store)) == {0}
        step_all(store, 0.01, 0)
        store.commit()
        # What is written from now on is shared out; with room for twice the records all of it is at once.
        assert directories(store).count(1) == 4
        crc = store.records_crc32c()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert len(store.status().drives) == 2
        assert (store.records_crc32c(), store.verify().failures) == (crc, [])


def test_without_a_commit_nothing_was_added(tmp_path: Path) -> None:
    small_store(tmp_path / "store").close()
    ParameterStore.open(tmp_path / "store", config(tmp_path / "b")).close()
    assert not (tmp_path / "b").exists()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert len(store.status().drives) == 1


def test_an_adding_that_was_killed_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new directory has its identity; the commit that would refer to it never came."""
    small_store(tmp_path / "store").close()
    with monkeypatch.context() as patched:
        patched.setattr(Index, "write", lambda self, **kwargs: (_ for _ in ()).throw(OSError(5, "gone")))
        with ParameterStore.open(tmp_path / "store", config(tmp_path / "b")) as store:
            step_all(store, 0.01, 0)
            with pytest.raises(OSError, match="gone"):
                store.commit()
    assert (tmp_path / "b" / "tierstore.json").exists()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (len(store.status().drives), store.last_commit.generation) == (1, 1)
    with ParameterStore.open(tmp_path / "store", config(tmp_path / "b")) as store:
        step_all(store, 0.01, 0)
        store.commit()
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert (len(store.status().drives), store.verify().failures) == (2, [])


# Creation ---------------------------------------------------------------------------------------------------


def test_a_creation_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Home, directories: int = 1) -> None:
        raise OSError(28, "no space for a name")

    with monkeypatch.context() as patched:
        patched.setattr(Home, "publish", fail)
        with ParameterStore.create(
            tmp_path / "store", [RecordSchema("expert", NUMEL)], config(tmp_path / "deep" / "b")
        ) as store:
            with pytest.raises(OSError, match="no space for a name"):
                store.commit()
            assert (tmp_path / "deep" / "b" / "tierstore.json").exists()
    assert list(tmp_path.iterdir()) == []


def test_a_creation_that_was_killed_is_no_obstacle(tmp_path: Path) -> None:
    """Killed when the stripe directory has its identity, and the store's own does not."""
    script = f"""
import os
from pathlib import Path
from child_process import run_python
from conftest_store import small_store
from tierstore.store import StripeConfig
from tierstore.store.disk.home import Home
Home.publish = lambda self, directories=1: os._exit(9)
small_store(Path({str(tmp_path / "store")!r}), stripe=StripeConfig(directories=(Path({str(tmp_path / "b")!r}),)))
"""
    run_python(script, status=9, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    assert (tmp_path / "b" / "tierstore.json").exists()
    with pytest.raises(StoreMissingError):
        ParameterStore.open(tmp_path / "store", CONFIG)
    with pytest.raises(StoreExistsError, match="found directory 1 of the store in"):
        small_store(tmp_path / "elsewhere", stripe=StripeConfig(directories=(tmp_path / "b",)))
    with striped(tmp_path) as store:
        assert store.verify().failures == []


def test_damage_names_the_drive(tmp_path: Path) -> None:
    with striped(tmp_path) as store:
        slot_bytes = store.info("e0").schema.layout(Group.WEIGHTS).slot_bytes
    path = tmp_path / "b" / "extents" / "expert.weights"
    with open(path, "r+b") as file:
        file.seek(slot_bytes)
        file.write(b"damage")
    failures = verify_store(tmp_path / "store").failures
    assert len(failures) == 1
    assert f"record 'e3', section weight, {path}, slot 1" in failures[0]
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        with pytest.raises(StoreError, match=f"record 'e3', section weight, {path}"):
            store.fetch(["e3"])
        path.rename(tmp_path / "aside")
    with pytest.raises(StoreFormatError, match=f"{path}: the extent file is missing"):
        ParameterStore.open(tmp_path / "store", CONFIG)


def test_a_profile_gives_the_first_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until operation has measured them; here both directories are on one disk, so what is looked up is made out."""
    point = IoPoint(
        chunk_bytes=1 << 20, queue_depth=8, read_bytes_per_s=9e9, write_bytes_per_s=3e9, measured="2026-11-21"
    )
    slower = replace(point, write_bytes_per_s=1e9)
    found = {tmp_path / "store": point, tmp_path / "b": slower}
    monkeypatch.setattr(drives, "load_io_point", lambda path: found[path])
    with striped(tmp_path) as store:
        assert [drive.share for drive in store.status().drives] == [0.75, 0.25]
        assert directories(store).count(0) == 6

    def damaged(path: Path) -> IoPoint:
        raise DataError(f"{path}: not a profile")

    monkeypatch.setattr(drives, "load_io_point", damaged)
    with ParameterStore.open(tmp_path / "store", CONFIG) as store:
        assert [drive.share for drive in store.status().drives] == [0.75, 0.25]  # known from the last commit
    stripe = StripeConfig(directories=(tmp_path / "d",))
    with small_store(tmp_path / "other", stripe=stripe) as store:
        assert [drive.share for drive in store.status().drives] == [0.5, 0.5]


@settings(deadline=None, max_examples=6)
@given(st.lists(st.sampled_from([1.0, 3.0, 20.0]), min_size=3, max_size=5), st.booleans())
def test_space_follows_the_shares_and_is_always_enough(
    tmp_path_factory: pytest.TempPathFactory, speeds: list[float], limited: bool
) -> None:
    """The second drive's speed changes at each commit, and everything is written anew between them."""
    root, count, numel = tmp_path_factory.mktemp("space"), 6, 100_000
    schema = RecordSchema("expert", numel)
    slot_bytes = sum(schema.layout(group).slot_bytes for group in COMMITTED_GROUPS)
    limits = (0, 4 * slot_bytes) if limited else ()
    stripe = StripeConfig(directories=(root / "b",), limits=limits, weights=(1.0, 1.0))
    with small_store(root / "store", count=count, numel=numel, budget=32 << 20, stripe=stripe) as store:
        for speed in speeds:
            shares = [1 / (1 + speed), speed / (1 + speed)]
            store.core._parts.drives.estimator.shares = shares
            store.commit()  # space follows the shares
            step_all(store, 0.1)
            store.commit()
            if not limited:
                assert abs(directories(store).count(1) - count * shares[1]) <= 2
            for group in COMMITTED_GROUPS:
                # And no more than that, but for what a change of shares adds until it is discarded.
                reserved = sum(extent.reserved_slots for extent in store.core.extents.of(0, group).extents)
                assert 2 * count <= reserved <= 3 * count
            if limited:
                assert store.status().drives[1].reserved_bytes <= 4 * slot_bytes
        crc = store.records_crc32c()
        store.commit()
    with ParameterStore.open(root / "store", StoreConfig(host_budget=32 << 20)) as store:
        assert (store.records_crc32c(), store.verify().failures) == (crc, [])
