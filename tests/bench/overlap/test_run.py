"""bench overlap: its arithmetic by hand, and a tiny run of two real ranks. No test asserts a speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierstore.bench.overlap import picture
from tierstore.bench.overlap.device import Computation
from tierstore.bench.overlap.rank import RankRequest, RankSteps, Stack
from tierstore.bench.overlap.run import (
    Balance,
    OverlapBench,
    Prefetch,
    RankProcesses,
    links_for,
    overlap_run,
    run,
)
from tierstore.bench.overlap.stack import StackShape
from tierstore.bench.pictures.slices import read_slices, slices_by_track
from tierstore.bench.processes.namespaces import rank_namespaces
from tierstore.bench.processes.spawn import WorkerError
from tierstore.cache.access import Phase
from tierstore.config import load
from tierstore.errors import ConfigError
from tierstore.links import LinkConfig, LinksConfig
from tierstore.train.config import TrainConfig

TINY = StackShape(
    layers=3,
    experts=2,
    dense_side=32,
    expert_side=32,
    cached_layers=2.0,
    forward_s=0.001,
    computation=Computation.DEVICE,
    vertical_depth=2,
)


def test_the_longest_of_the_three_is_what_a_step_is_held_against() -> None:
    """2 s of computation, 3 MB sent and 1 MB from disk at 1 MB/s each; a step took 6 s, and 4 s without limits."""
    found = RankSteps(
        step_samples_s=[6.0],
        computing_s=2.0,
        disk_bytes=1e6,
        disk_transfers=1,
        sent_bytes=3e6,
        collectives=1,
        stalls={},
    )
    links = LinksConfig(gather=LinkConfig(bandwidth=10**6), disk=LinkConfig(bandwidth=10**6))
    times = overlap_run(Balance.EQUAL, Prefetch.BOTH, links, found, 4.0)
    assert (times.gathers_s, times.fetches_s) == (3.0, 1.0)
    assert (times.longest_s, times.serial_s) == (3.0, 6.0)
    assert (times.longest_ratio, times.unlimited_ratio) == (2.0, 1.5)


@pytest.mark.parametrize(
    ("balance", "gathers", "fetches"),
    [
        (Balance.EQUAL, 0.3, 0.3),
        (Balance.COMPUTATION, 0.1, 0.1),
        (Balance.GATHERS, 0.9, 0.3),
        (Balance.FETCHES, 0.3, 0.9),
    ],
)
def test_links_take_the_time_that_they_are_to(balance: Balance, gathers: float, fetches: float) -> None:
    """0.3 s of computation, 6 MB sent and 9 MB from and to the disk. Copies take a quarter of an equal share."""
    links = links_for(balance, 0.3, 6e6, 9e6)
    assert 6e6 / links.gather.bandwidth == pytest.approx(gathers)
    assert 9e6 / links.disk.bandwidth == pytest.approx(fetches)
    assert 9e6 / links.copy.bandwidth == pytest.approx(min(gathers, fetches) / 4)


def test_the_stack_has_a_unit_and_a_backward_pass_a_layer() -> None:
    schedule = TINY.schedule()
    backward = [item for item in schedule.passes if item.phase is Phase.BACKWARD]
    assert len(backward) == TINY.layers
    assert [unit.gathered for unit in schedule.units] == [4 * 32 * 32] * 3


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """What it measures is there and adds up; each pass of the last step is drawn."""
    timeline = tmp_path / "timeline.json"
    bench = OverlapBench(directory=tmp_path / "place", steps=1, warmup=1, timeline=timeline, shape=TINY)
    result = run(bench)
    assert not bench.directory.exists()
    cases = [(one.balance, one.prefetch) for one in result.runs]
    assert cases == [
        *((balance, Prefetch.BOTH) for balance in Balance),
        *((Balance.EQUAL, prefetch) for prefetch in Prefetch if prefetch is not Prefetch.BOTH),
    ]
    # 3 gathers of the forward and 1 of the backward passes (two units stay), 3 reductions, of half a unit each.
    assert result.collectives == 7
    assert result.sent_bytes == 7 * 4 * 32 * 32 / 2
    for one in result.runs:
        assert one.longest_s == max(one.computation_s, one.gathers_s, one.fetches_s)
        # No step is shorter than what it has to compute; what it has to gather may straddle two steps.
        assert one.step_s >= one.computation_s / 2
        assert {stall.cause.split(":")[0] for stall in one.stalls} == {"horizontal", "vertical"}
    slices, (begin, end) = picture.last_step(read_slices(timeline))
    assert end > begin
    passes = [name for name, _, _ in slices["compute"]]
    assert [name for name in passes if not name.startswith("optimizer")] == [
        *("forward 0", "forward 1", "forward 2", "backward 2", "backward 1", "backward 0")
    ]
    assert {"gathers", "reduce-scatters", "device copies", "disk reads", "disk writes", "optimizer"} <= set(
        slices
    )


def test_the_picture_is_the_same_file_twice(tmp_path: Path) -> None:
    named = {"ph": "M", "name": "thread_name", "tid": 1, "args": {"name": "compute"}}
    events: list[dict[str, Any]] = [named]
    for step in range(2):
        for place, name in enumerate(("forward 0", "backward 0", "optimizer 0")):
            begin = 1000.0 * step + 300 * place
            events.append({"ph": "X", "name": name, "tid": 1, "ts": begin, "dur": 250.0})
    timeline = tmp_path / "timeline.json"
    timeline.write_text(json.dumps(events))
    found = []
    for name in ("one.svg", "two.svg"):
        picture.draw(timeline, tmp_path / name)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert found[0].count(b"<svg") == 1
    slices, step_ends = picture.last_step(slices_by_track(events))
    assert step_ends == (1000.0, 1850.0)
    assert len(slices["compute"]) == 3


@pytest.mark.slow
def test_ranks_meet_through_namespaces_where_there_are_some(tmp_path: Path) -> None:
    """At 1 MiB/s: 7 messages of 2 KiB a step fit the bucket, so nothing is asserted of their time."""
    asked = RankRequest(directory=tmp_path / "run", steps=1, warmup=1, shape=TINY)
    with (
        rank_namespaces(2, bandwidth=1 << 20) as (resolution, namespaces),
        RankProcesses(namespaces) as ranks,
    ):
        assert len(namespaces) == (2 if resolution else 0)
        assert ranks.measure(asked).sent_bytes == 7 * 4 * 32 * 32 / 2


@pytest.mark.slow
def test_the_trainer_steps_over_limited_links(tmp_path: Path) -> None:
    """Two ranks; a transfer of the copy link takes 1 ms, so a step is no shorter than its loads of experts."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 1024)
    settings = {
        **{
            "model.d_model": 16,
            "model.n_layers": 2,
            "model.n_heads": 2,
            "model.seq_len": 8,
            "model.d_ff": 16,
        },
        **{"model.experts": 4, "data.batch_size": 4, "data.paths": str(text), "host_budget": "1MiB"},
        **{"links.gather.bandwidth": "100MiB", "links.copy.latency": 0.001, "threads": 1},
    }
    config = load(TrainConfig, None, settings)
    asked = RankRequest(
        directory=tmp_path / "run", steps=1, warmup=1, stack=Stack.TRAINER, train=config, links=config.links
    )
    with RankProcesses() as ranks:
        found = ranks.measure(asked)
        assert not asked.directory.exists()
        assert found.sent_bytes > 0
        assert found.step_s >= 0.002  # each layer has experts to load, forward and backward
        assert {"horizontal: gather", "vertical: copy"} <= set(found.stalls)
        # It is refused on both ranks, in a line.
        with pytest.raises(WorkerError, match=r"rank 0: ConfigError: data\.batch_size"):
            ranks.measure(replace(asked, train=replace(config, data=replace(config.data, batch_size=3))))


def test_bad_requests(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists"):
        run(OverlapBench(directory=tmp_path))
    with pytest.raises(ConfigError, match="at least 1"):
        OverlapBench(steps=0)
    with pytest.raises(ConfigError, match="synthetic"):
        OverlapBench(stack=Stack.TRAINER, svg=tmp_path / "picture.svg")
