"""The soak finds nothing where nothing is wrong, through kills; and what was done to the store behind its back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from conftest_store import flip_bit

from tierstore.bench.harness import Progress
from tierstore.bench.probes import disk_bytes
from tierstore.bench.soak import Soak, stored_bytes
from tierstore.bench.soak_plan import (
    FORGETFUL,
    LEARNING_RATE,
    Misuse,
    OperationKind,
    SoakPlan,
    SoakShape,
    StoreModel,
    audit,
    committed_generation,
    gradient,
    key_of,
)
from tierstore.bench.tiers import TiersBench
from tierstore.errors import ConfigError
from tierstore.store import Group, NewRecord, ParameterStore, StoreConfig
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.store.index.database import Index

pytestmark = pytest.mark.usefixtures("forked_python")

SMALL = SoakShape(store_bytes=2 << 20, record_bytes=24 << 10, host_budget_bytes=1 << 18)


class Watched(Progress):
    """Calls ``watch`` with what is shown."""

    def __init__(self, watch: Callable[[Mapping[str, object]], None]) -> None:
        self._watch = watch

    def update(self, done: int, total: int, fields: Mapping[str, object]) -> None:
        self._watch(fields)


def small_soak(
    place: Path,
    seconds: float,
    *,
    kill_every_s: float = 0.3,
    between_lives: Callable[[int], None] = lambda life: None,
    watch: Callable[[Mapping[str, object]], None] = lambda fields: None,
) -> dict[str, Any]:
    soak = Soak(place, SMALL, seconds, kill_every_s=kill_every_s, between_lives=between_lives)
    found = soak.run(Watched(watch))
    assert found.failed == bool(found.figures["failures"])
    return dict(found.figures)


def flip_byte(place: Path, record: int, group: Group, offset: int) -> None:
    """In the slot that the last commit refers to; nobody has the store open."""
    index = Index(place / "index")
    entry = index.read_commit().records[key_of(record)]
    index.close()
    schema = SMALL.schema(record)
    at = entry.groups[COMMITTED_GROUPS.index(group)].slot * schema.layout(group).slot_bytes + offset
    flip_bit(place / "extents" / f"{schema.name}.{group.label}", 8 * at + 4)


# The plan --------------------------------------------------------------------------------------------------


def test_the_plan_is_a_function_of_the_position() -> None:
    forward, backward = SoakPlan(SMALL), SoakPlan(SMALL)
    operations = [forward.operation(position) for position in range(600)]
    assert [backward.operation(position) for position in reversed(range(600))] == operations[::-1]
    other = SoakPlan(SoakShape(seed=1))
    assert [other.operation(position) for position in range(600)] != operations
    kinds = Counter(operation.kind for operation in operations)
    assert kinds[OperationKind.FETCH] > kinds[OperationKind.UPDATE] > kinds[OperationKind.COMMIT] > 0
    for operation in operations:
        assert 1 <= len(operation.records) == len(set(operation.records)) <= 4
        assert max(operation.records) < SMALL.records


def test_the_shape() -> None:
    whole, split = SMALL.schemas
    assert whole.numel % 1024 == 0
    assert split.numel % 1024
    total = SMALL.records // 2 * (whole.record_bytes + split.record_bytes)
    assert total >= 2 * SMALL.budget  # a fetch of everything must be refused
    assert SoakShape(**asdict(SMALL)) == SMALL


# Nothing is wrong ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_three_seconds_with_kills(tmp_path: Path) -> None:
    sizes: list[int] = []
    shown: list[Mapping[str, object]] = []
    # As long as it takes to fetch, and to be killed twice: processes start slowly on a machine that is busy.
    for seconds in (3, 6, 12, 24):
        place = tmp_path / f"soak of {seconds} s"  # one that failed keeps its store
        found = small_soak(
            place,
            seconds,
            kill_every_s=0.6,
            between_lives=lambda life, place=place: sizes.append(disk_bytes(place)),
            watch=shown.append,
        )
        assert [line for line in found["failures"] if not line.startswith("nothing was fetched")] == []
        if found["failures"] == [] and found["kills_count"] >= 2:
            break
    assert found["failures"] == []
    assert found["kills_count"] >= 2
    assert found["wrong_bytes"] == 0
    assert found["lives_count"] >= found["kills_count"]
    assert found["verified_bytes"] > found["audited_bytes"] > 0
    assert found["read_bytes"] > 0
    assert found["reopen"]["times_count"] >= 1
    assert min(found["operations"][f"{name}_count"] for name in ("fetch", "update")) > 0
    assert isinstance(shown[-1]["kills"], int)
    assert max(sizes) <= stored_bytes(SMALL) + (1 << 20)
    assert not place.exists()


@pytest.mark.slow
def test_a_store_over_two_drives(tmp_path: Path) -> None:
    """Killed and audited as one: a byte changed on the second drive is found there."""
    place, further = tmp_path / "soak", tmp_path / "other" / "drive"
    damaged: list[Path] = []

    def damage(life: int) -> None:
        if damaged or not (place / "tierstore.json").exists():
            return
        index = Index(place / "index")
        entries = index.read_commit().records
        index.close()
        assert {location.directory for entry in entries.values() for location in entry.groups} == {0, 1}
        record, location, group = next(
            (record, location, group)
            for record in range(SMALL.records)
            for location, group in zip(entries[key_of(record)].groups, COMMITTED_GROUPS, strict=True)
            if location.directory == 1
        )
        schema = SMALL.schema(record)
        damaged.append(further / "extents" / f"{schema.name}.{group.label}")
        flip_bit(damaged[0], 8 * (location.slot * schema.layout(group).slot_bytes + 77) + 4)

    def over_two(seconds: float, **options: Callable[[int], None]) -> Mapping[str, Any]:
        soak = Soak(place, SMALL, seconds, further=(further,), kill_every_s=0.6, **options)
        return soak.run(Progress()).figures

    found = over_two(3)
    assert found["failures"] == []
    assert found["audited_bytes"] > 0 or found["kills_count"] == 0
    assert found["directories"] == (place, further)
    assert not place.exists()
    assert not further.exists()
    (failure,) = over_two(20, between_lives=damage)["failures"]
    assert str(damaged[0]) in failure
    assert "1 wrong bytes" in failure
    with pytest.raises(ConfigError, match="drive exists"):
        Soak(tmp_path / "new", SMALL, 1, further=(further,)).run(Progress())


def test_every_misuse_is_refused(tmp_path: Path) -> None:
    """A soak of one life reaches all of them: which, says the plan."""
    plan = SoakPlan(SMALL)
    misuses = {op.misuse for op in (plan.operation(p) for p in range(300)) if op.kind is OperationKind.MISUSE}
    for seconds in (2, 4, 8):
        found = small_soak(tmp_path / "soak", seconds, kill_every_s=0)
        assert found["failures"] == []
        assert found["kills_count"] == 0
        if {fault["fault"] for fault in found["faults"]} >= {misuse.value for misuse in misuses}:
            break
    assert {fault["fault"] for fault in found["faults"]} >= {misuse.value for misuse in misuses}
    documented = {fault["fault"]: fault["error"] for fault in found["faults"]}
    assert documented[Misuse.LEASED_UPDATE.value] == "StoreError"
    assert found["trends"]["descriptors"]["first_count"] == found["trends"]["descriptors"]["last_count"]


# Something is wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [Group.WEIGHTS, Group.MOMENTS])
def test_one_byte_changed_while_the_store_was_closed_is_found(tmp_path: Path, group: Group) -> None:
    place = tmp_path / "soak"
    damaged: list[int] = []

    def damage(life: int) -> None:
        if not damaged and (place / "tierstore.json").exists():
            damaged.append(life)
            flip_byte(place, 5, group, 777)

    found = small_soak(place, 20, between_lives=damage)
    assert len(damaged) == 1
    assert found["wrong_bytes"] == 1
    (failure,) = found["failures"]
    assert key_of(5) in failure
    assert str(place / "extents") in failure
    assert place.exists()  # to be looked at


def test_bytes_changed_while_the_store_is_open_are_found(tmp_path: Path) -> None:
    place = tmp_path / "soak"
    name = f"{SMALL.schemas[0].name}.weights"
    layout = SMALL.schemas[0].layout(Group.WEIGHTS)
    damaged: list[str] = []

    def damage(fields: Mapping[str, object]) -> None:
        path = place / "extents" / name
        if not damaged and path.exists():
            damaged.append(name)
            with open(path, "r+b") as file:
                for slot in range(path.stat().st_size // layout.slot_bytes):
                    file.seek(slot * layout.slot_bytes)
                    file.write(b"?")

    found = small_soak(place, 20, kill_every_s=0, watch=damage)
    assert damaged
    (failure,) = found["failures"]
    assert failure.startswith(("ChecksumError: ", "SoakFailure: verify: "))
    assert name in failure


@pytest.mark.slow
def test_a_commit_that_was_lost_is_found(tmp_path: Path) -> None:
    """The store is put back to an older commit, which is whole in itself."""
    place, kept = tmp_path / "soak", tmp_path / "kept"
    restored: list[int] = []

    def restore(life: int) -> None:
        if not kept.exists():
            if (place / "tierstore.json").exists():
                shutil.copytree(place, kept)
        elif not restored and committed_generation(place) > committed_generation(kept) + 1:
            restored.append(life)
            shutil.rmtree(place)
            shutil.copytree(kept, place)

    found = small_soak(place, 25, kill_every_s=1.0, between_lives=restore)
    assert restored
    (failure,) = found["failures"]
    assert "the store is at commit" in failure


def test_content_that_its_checksums_agree_with_is_found(tmp_path: Path) -> None:
    """Checksums are the store's own: the audit compares with the model, whatever they say."""
    place = tmp_path / "store"
    shape = SoakShape(store_bytes=1 << 19, record_bytes=24 << 10, host_budget_bytes=1 << 18)
    model = StoreModel(shape.seed, [0] * shape.records, retain=1)
    config = StoreConfig(host_budget=shape.budget, retain=1)
    with ParameterStore.create(place, shape.schemas, config, adamw=FORGETFUL) as store:
        store.register_many(
            NewRecord(
                key_of(r),
                shape.schema(r).name,
                weight=lambda r=r: gradient(shape.seed, r, 0, shape.schema(r).numel),
            )
            for r in range(shape.records)
        )
        store.commit(snapshot="first")
        model.commit("first")
        wrong = gradient(shape.seed, 3, 8, shape.schema(3).numel)
        wrong[40] *= -1
        store.update({key_of(3): wrong}, lr=LEARNING_RATE)
        model.update([3], 8)
        store.commit()
        model.commit()
    found = audit(place, shape, model)
    # The sign of one element: of its moment and of its weight, whose upper half alone has it.
    assert found.wrong_bytes == 2
    assert all(key_of(3) in text and "last commit" in text for text in found.wrong)
    assert found.verified_bytes >= sum(shape.schema(r).record_bytes for r in range(shape.records))
    model.snapshots = {"first": [0] * 3 + [8] + [0] * (shape.records - 4)}
    assert any(text.startswith("first: ") for text in audit(place, shape, model).wrong)
    model.snapshots = {}
    assert "snapshots ['first'], expected []" in audit(place, shape, model).wrong[0]


# The command -----------------------------------------------------------------------------------------------


def test_an_interrupt_ends_it_cleanly(tmp_path: Path) -> None:
    place = tmp_path / "soak"
    arguments = ["--store-bytes=2MiB", "--record-bytes=24KiB", "--budget=0.1", "--minutes=5", "--json"]
    command = [sys.executable, "-m", "tierstore.cli.main", "bench", "tiers", f"--store={place}", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ), text=True
    )
    deadline = time.monotonic() + 30
    while not (place / "tierstore.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["interrupted"] is True
    assert found["failures"] == []
    assert "interrupted" in err
    assert not place.exists()


def test_what_cannot_be(tmp_path: Path) -> None:
    for wrong in ({"minutes": 0.0}, {"minutes": 1.0, "kill_every": -1.0}):
        with pytest.raises(ConfigError, match="expected"):
            TiersBench(store=tmp_path / "s", **wrong)
    with pytest.raises(ConfigError, match="directory of its own"):
        Soak(tmp_path, SMALL, 1).run(Progress())
    huge = SoakShape(store_bytes=1 << 50, record_bytes=1 << 40)
    with pytest.raises(OSError, match="free"):
        Soak(tmp_path / "s", huge, 1).run(Progress())
    assert not (tmp_path / "s").exists()
