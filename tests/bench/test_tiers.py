"""bench tiers: what the traffic is, what is counted, and small runs of every mode. Nothing here asserts a speed."""

import asyncio
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TinyBench

from tierstore.bench import tiers
from tierstore.bench.harness import Progress
from tierstore.bench.soak_plan import StoreModel
from tierstore.bench.tiers import Point, TiersBench
from tierstore.bench.tiers_load import TierLoad, TierTraffic, TrafficStep, partly_dirty, recorded, synthetic
from tierstore.cache.access import Need, Phase
from tierstore.errors import ConfigError
from tierstore.lab.generators import RoutingWorkload
from tierstore.lab.importing import write_trace
from tierstore.lab.requests import trace_requests
from tierstore.lab.routing import Sections
from tierstore.store import AdamWConfig, Inactive, ParameterStore, RecordSchema, StoreConfig
from tierstore.trace.format import EventColumns, RecordTable, Trace, TraceHeader, TraceRecord

pytestmark = pytest.mark.usefixtures("forked_python")

FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD


# TierTraffic ---------------------------------------------------------------------------------------------------


def test_traffic_of_a_trace_by_hand() -> None:
    """Records 1 and 3 are never asked for, so records 0, 2 and 4 become 0, 1 and 2."""
    layers = [0, 0, 0, 0, 1]
    table = RecordTable([TraceRecord(layer, (1, 2, 1), (8, 16, 8), 0b011) for layer in layers])
    events = EventColumns.build(
        [2, 1, 1, 2, 1],
        [0, 2, 4, 4, 0, 2, 2],
        phases=[FORWARD, FORWARD, BACKWARD, BACKWARD, FORWARD],
        layers=[0, 1, 1, 0, 0],
        steps=[0, 0, 0, 0, 1],
        flags=[
            *[Need.WEIGHTS] * 3,
            Need.STEP,
            Need.STEP | Need.ACCUMULATE,
            Need.WEIGHTS | Need.MOMENTS,
            Need.WEIGHTS,
        ],
    )
    header = TraceHeader(100, policy="lru", records=table, origin="by hand")
    found = TierTraffic.of(trace_requests(Trace(header=header, **vars(events)), name="hand"))
    assert found.name == "hand"
    assert found.layers == (0, 0, 1)
    assert found.steps == (TrafficStep(((0, 1), (2,)), (0, 2)), TrafficStep(((1,),), ()))


def test_synthetic_traffic_trains_what_it_touches() -> None:
    found = synthetic(100, seed=1)
    assert found.steps == synthetic(100, seed=1).steps != synthetic(100, seed=2).steps
    for step in found.steps:
        touched = {record for keys in step.fetches for record in keys}
        assert step.stepped == tuple(sorted(touched))
        assert all({found.layers[record] for record in keys} == {n} for n, keys in enumerate(step.fetches))
    assert set(found.layers) == {0, 1, 2, 3}
    assert set(synthetic(8, seed=0).layers) == {0, 1}


def test_a_recorded_trace_is_the_one_that_was_made(tmp_path: Path) -> None:
    workload = RoutingWorkload(
        layers=2, experts=6, k=2, tokens_per_step=3, steps=5, sections=Sections.SPLIT, weight_bytes=4096
    )
    path = tmp_path / "routing.trace"
    write_trace(path, workload.table(), workload.chunks(), origin="generated")
    found = recorded(path)
    assert len(found.steps) == 5
    assert all(len(step.fetches) == 2 for step in found.steps)


def test_partly_dirty() -> None:
    steps = [TrafficStep(((0, 1),), tuple(range(400))), TrafficStep((), ())]
    assert list(islice(partly_dirty(steps, 1.0, 0), 4)) == steps * 2
    assert [step.stepped for step in islice(partly_dirty(steps, 0.0, 0), 2)] == [(), ()]
    first, _, again = islice(partly_dirty(steps, 0.25, 0), 3)
    assert 60 < len(first.stepped) < 140
    assert first.stepped != again.stepped
    assert first.fetches == steps[0].fetches


# What is counted -------------------------------------------------------------------------------------------


def test_counts_by_hand(tmp_path: Path) -> None:
    """Everything fits, and each step changes records 0 and 1 of four; a commit after every second step."""
    schema = RecordSchema("r", 2048)
    keys = [f"k{number}" for number in range(4)]
    config = StoreConfig(host_budget=1 << 20, retain=1)
    adamw = AdamWConfig(inactive=Inactive.SKIP)
    with ParameterStore.create(tmp_path / "s", [schema], config, adamw=adamw) as store:
        for key in keys:
            store.register(key, "r")
        store.commit()
        model = StoreModel(0, [0] * 4, retain=1)
        model.commit()
        load = TierLoad(store, keys, model, at_once=2, commit_every=2)
        steps = partly_dirty([TrafficStep(((0, 1, 2),), (0, 1))], 1.0, 0)
        found = asyncio.run(load.run(steps, 0.0))
        before = store.last_commit.generation
        more = asyncio.run(load.run(steps, 0.05))
        assert store.last_commit.generation == model.generation
        assert more.commits == store.last_commit.generation - before - 1
    # The third step finds a commit due, and runs beside it; the last commit has that step alone.
    assert (found.steps, found.commits) == (3, 2)
    assert found.changed_bytes == 3 * 2 * schema.record_bytes
    assert found.dirty_bytes == found.engine_written_bytes == 2 * 2 * schema.record_bytes
    assert found.fetched_bytes == 3 * 3 * 2048 * 4
    assert (found.hits, found.misses, found.read_bytes) == (3 * 3 + 3 * 2 * 2, 0, 0)
    # Records 0 and 1 as they are and as they were committed; 2 and 3 are shared.
    assert found.needed_copies == 2 * 2 + 2
    assert (len(found.fetch), len(found.update), len(found.commit)) == (3, 3, 2)
    assert more.engine_written_bytes == more.commits * 2 * schema.record_bytes


# Runs ------------------------------------------------------------------------------------------------------


class Heard(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def small(store: Path, **options: Any) -> TiersBench:
    given: dict[str, Any] = {
        "record_bytes": (24 << 10,),
        "budget": (0.3,),
        "dirty": (1.0,),
        "store_bytes": 3 << 20,
        "seconds": 0.4,
    }
    return TiersBench(store=store, **given | options)


def test_points() -> None:
    lists: dict[str, Any] = {"record_bytes": (1 << 20, 1 << 16), "budget": (0.5, 0.1), "dirty": (1.0, 0.0)}
    star = TiersBench(store=Path("nowhere"), **lists).points
    assert star == [
        Point(1 << 20, 0.5, 1.0),
        Point(1 << 20, 0.1, 1.0),
        Point(1 << 20, 0.5, 0.0),
        Point(1 << 16, 0.5, 1.0),
    ]
    full = TiersBench(store=Path("nowhere"), full=True, **lists).points
    assert len(full) == len(set(full)) == 8
    assert set(star) <= set(full)


@pytest.mark.slow
def test_a_sweep(tmp_path: Path) -> None:
    progress = Heard()
    run = small(tmp_path / "b", budget=(0.3, 1.0), dirty=(1.0, 0.0)).run(progress)
    assert not (tmp_path / "b").exists()
    assert run.figures["failures"] == []
    assert progress.said[0].startswith("3 points of 0.4 s; stores of up to ")
    some, everything, clean = points = run.figures["points"]
    assert some["hit_ratio"] < everything["hit_ratio"]
    for row in (some, everything):
        assert 0 < row["write_amplification_ratio"] <= 1.05
        assert row["write_target_met"] is True
        assert row["write_to_dirty_ratio"] >= row["write_amplification_ratio"]
        assert row["drive_life_s"] == pytest.approx(600e12 / row["written_bytes_per_s"])
        assert row["wear_per_step_bytes"] * row["steps"] == pytest.approx(row["written_bytes"])
        assert row["read_bytes_per_s"] >= 0
    assert clean["changed_bytes"] == 0
    assert clean["write_amplification_ratio"] is None
    assert clean["write_target_met"] is None
    for row in points:
        assert 1 <= row["space_amplification_ratio"] <= row["space_target_ratio"]
        assert 1 <= row["space_needed_ratio"] <= 3  # live, committed, one snapshot
        assert row["fetch"]["p50_s"] <= row["fetch"]["p99_s"] <= row["fetch"]["p99.9_s"]
    names = {measurement.name for measurement in run.measurements}
    assert {"fetched", "fetch p99.9", "commit p99", "write amplification", "space amplification"} <= names


def test_a_sweep_of_a_recorded_trace(tmp_path: Path) -> None:
    workload = RoutingWorkload(
        layers=2, experts=10, k=2, tokens_per_step=3, steps=6, sections=Sections.SPLIT, weight_bytes=8192
    )
    path = tmp_path / "routing.trace"
    write_trace(path, workload.table(), workload.chunks(), origin="generated")
    found = small(tmp_path / "b", trace=path).run(Progress()).figures
    assert found["traffic"] == "routing.trace"
    assert found["points"][0]["records"] <= 20
    assert found["points"][0]["steps"] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"record_bytes": (4096,)},
        {"budget": (0.0,)},
        {"budget": (1.5,)},
        {"dirty": (-0.1,)},
        {"seconds": 0.0},
        {"retain": -1},
        {"endurance": 0},
    ],
)
def test_what_cannot_be(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))}: expected"):
        small(tmp_path / "b", **wrong)


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory of its own"):
        small(tmp_path).run(Progress())
    with pytest.raises(OSError, match="free"):
        small(tmp_path / "b", store_bytes=1 << 50, record_bytes=(1 << 40,)).run(Progress())
    assert not (tmp_path / "b").exists()


# The command -----------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path, tiny_bench: TinyBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a target that is missed its exit status is 1."""
    monkeypatch.setattr(tiers, "WRITE_AMPLIFICATION_TARGET", 0.01)
    sizes = ["--record-bytes=24KiB", "--store-bytes=2MiB", "--budget=0.3", "--dirty=1", "--seconds=0.3"]
    found = tiny_bench("tiers", f"--store={tmp_path / 'b'}", *sizes, "--endurance=1TB", status=1)
    assert found.figures["endurance_bytes"] == 1e12
    assert len(found.figures["points"]) == 1
    (failure,) = found.figures["failures"]
    assert failure.startswith("records of 24 KiB, budget 30%: write amplification ")
    assert failure.endswith("expected at most 0.01")
    assert "written / changed" in found.table
    assert f"FAILED: {failure}" in found.table
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_the_soak_command(tmp_path: Path, tiny_bench: TinyBench) -> None:
    sizes = ["--record-bytes=24KiB", "--store-bytes=2MiB", "--budget=0.1"]
    drives = [f"--store={tmp_path / 'b'}", f"--drive={tmp_path / 'c'}"]
    run = tiny_bench("tiers", *drives, *sizes, "--minutes=0.03", "--kill-every=0.5", "--seed=3")
    assert run.figures["wrong_bytes"] == 0
    assert run.figures["seed"] == 3
    assert run.figures["directories"] == [str(tmp_path / "b"), str(tmp_path / "c")]
    assert "wrong bytes" in run.table
    assert "reopening, median" in run.table


def test_noise_is_not_zeros(tmp_path: Path) -> None:
    """A virtual disk may be faster with zeros, and a file system may not store them."""
    schema = RecordSchema("r", 1024)
    with ParameterStore.create(tmp_path / "s", [schema], StoreConfig(host_budget=1 << 20)) as store:
        store.register("k", "r")
        store.commit()
        load = TierLoad(store, ["k"], StoreModel(0, [0]), at_once=1, commit_every=1)
        asyncio.run(load.run(partly_dirty([TrafficStep(((0,),), (0,))], 1.0, 0), 0.0))
        with store.fetch(["k"]) as lease:
            assert len(np.unique(lease["k"].copy("weight"))) > 1
