"""bench overlap: its arithmetic by hand, and a tiny run of two real ranks. No test asserts a speed."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyBench, bench_status

from tierstore.bench.namespaces import probe_namespaces, rank_namespaces
from tierstore.bench.overlap import (
    Balance,
    Computation,
    Prefetch,
    RankProcesses,
    RankRequest,
    RankSteps,
    Stack,
    StackShape,
    draw,
    last_step,
    links_for,
    overlap_run,
)
from tierstore.bench.overlap_rank import schedule_of
from tierstore.bench.processes import WorkerError
from tierstore.cache.access import Phase
from tierstore.config import load
from tierstore.links import LinkConfig, LinksConfig
from tierstore.timeline import read_slices, slices_by_track
from tierstore.train.config import TrainConfig

pytestmark = pytest.mark.usefixtures("forked_python")

FOUR = ("computation", "gathers", "fetches", "copies")
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


def test_the_longest_of_the_four_is_what_a_step_is_held_against() -> None:
    """2 s of computation, 3 MB sent, 1 MB from disk, 2 MB copied at 1 MB/s each; a step took 6 s, and 4 s without limits."""
    found = RankSteps(
        step_samples_s=[6.0],
        computing_s=2.0,
        disk_bytes=1e6,
        disk_transfers=1,
        sent_bytes=3e6,
        collectives=1,
        copied_bytes=2e6,
        stalls={},
    )
    links = LinksConfig(**dict.fromkeys(("gather", "disk", "copy"), LinkConfig(bandwidth=10**6)))
    times = overlap_run(Balance.EQUAL, Prefetch.BOTH, links, found, 4.0)
    assert (times["gathers_s"], times["fetches_s"], times["copies_s"]) == (3.0, 1.0, 2.0)
    assert (times["longest_s"], times["serial_s"]) == (3.0, 8.0)
    assert (times["ratio"], times["driven_ratio"]) == (2.0, 1.5)


@pytest.mark.parametrize(
    ("balance", "gathers", "fetches", "copies"),
    [
        (Balance.EQUAL, 0.3, 0.3, 0.3),
        (Balance.COMPUTATION, 0.1, 0.1, 0.1),
        (Balance.GATHERS, 0.9, 0.3, 0.3),
        (Balance.FETCHES, 0.3, 0.9, 0.3),
        (Balance.COPIES, 0.3, 0.3, 0.9),
    ],
)
def test_links_take_the_time_that_they_are_to(
    balance: Balance, gathers: float, fetches: float, copies: float
) -> None:
    """0.3 s of computation, 6 MB sent, 9 MB from and to the disk, 4 MB from and to the device."""
    links = links_for(balance, 0.3, 6e6, 9e6, 4e6)
    assert 6e6 / links.gather.bandwidth == pytest.approx(gathers)
    assert 9e6 / links.disk.bandwidth == pytest.approx(fetches)
    assert 4e6 / links.copy.bandwidth == pytest.approx(copies)


def test_the_stack_has_a_unit_and_a_backward_pass_a_layer() -> None:
    schedule = schedule_of(TINY)
    backward = [item for item in schedule.passes if item.phase is Phase.BACKWARD]
    assert len(backward) == TINY.layers
    assert [unit.gathered for unit in schedule.units] == [4 * 32 * 32] * 3


@pytest.mark.slow
def test_a_tiny_run(tmp_path: Path, tiny_bench: TinyBench) -> None:
    """What it measures is there and adds up; each pass of the last step is drawn."""
    timeline, svg = tmp_path / "timeline.json", tmp_path / "step.svg"
    small = ["--layers=3", "--forward-ms=1", "--computation=device", "--steps=1", "--warmup=1"]
    outputs = [f"--timeline={timeline}", f"--svg={svg}"]
    found = tiny_bench("overlap", *small, *outputs, f"--store={tmp_path / 'bench'}")
    assert not (tmp_path / "bench").exists()
    runs = found.figures["runs"]
    assert [(run["balance"], run["prefetch"]) for run in runs] == [
        *((balance.value, "both") for balance in Balance),
        *(("all equal", prefetch.value) for prefetch in Prefetch if prefetch is not Prefetch.BOTH),
    ]
    # 3 gathers of the forward and 1 of the backward passes (two layers stay), 3 reductions, of half a layer each.
    assert found.figures["collectives"] == 7
    assert found.figures["sent_bytes"] == 7 * 4 * 512 * 512 / 2
    # Each of 12 experts is copied up once or twice, and its gradient down.
    assert 2 * 12 <= found.figures["copied_bytes"] / (4 * 256 * 256) <= 3 * 12
    for run in runs:
        assert run["longest_s"] == max(run[f"{what}_s"] for what in FOUR)
        # No step is shorter than what it has to compute; what it has to gather may straddle two steps.
        assert run["step_s"] >= run["computation_s"] / 2
        # A transfer that is never waited for has no stall: which of the two there is depends on the machine's load.
        assert {stall["cause"].split(":")[0] for stall in run["stalls"]} <= {"horizontal", "vertical"}
    assert "/ longest" in found.table
    listed = [one for one in found.document.measurements if one.name == "step to the longest"]
    assert [one.target for one in listed] == [1.10, *[1.05] * 4, None, None, None]
    assert [one.median for one in listed] == pytest.approx([run["ratio"] for run in runs])
    slices, (begin, end) = last_step(read_slices(timeline))
    assert end > begin
    passes = [name for name, _, _ in slices["compute"]]
    assert [name for name in passes if not name.startswith("optimizer")] == [
        *("forward 0", "forward 1", "forward 2", "backward 2", "backward 1", "backward 0")
    ]
    assert {"gathers", "reduce-scatters", "device copies", "disk reads", "disk writes", "optimizer"} <= set(
        slices
    )
    assert "<svg" in svg.read_text()


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
        draw(timeline, tmp_path / name)
        found.append((tmp_path / name).read_bytes())
    assert found[0] == found[1]
    assert found[0].count(b"<svg") == 1
    slices, step_ends = last_step(slices_by_track(events))
    assert step_ends == (1000.0, 1850.0)
    assert len(slices["compute"]) == 3


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    """Two ranks, in network namespaces where there are some. Nothing here fills their buckets."""
    bandwidth = 1 << 20 if probe_namespaces().available else 0
    with rank_namespaces(2, bandwidth=bandwidth) as namespaces, RankProcesses(namespaces) as started:
        yield started


@pytest.mark.slow
def test_ranks_meet_through_namespaces_where_there_are_some(tmp_path: Path, ranks: RankProcesses) -> None:
    asked = RankRequest(directory=tmp_path / "run", steps=1, warmup=1, shape=TINY)
    assert ranks.measure(asked).sent_bytes == 7 * 4 * 32 * 32 / 2


@pytest.mark.slow
def test_the_trainer_steps_over_limited_links(tmp_path: Path, ranks: RankProcesses) -> None:
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
    found = ranks.measure(asked)
    assert not asked.directory.exists()
    assert found.sent_bytes > 0
    assert found.step_s >= 0.002  # each layer has experts to load, forward and backward
    assert {"horizontal: gather", "vertical: copy"} <= set(found.stalls)
    # It is refused on both ranks, in a line, which ends them.
    with pytest.raises(WorkerError, match=r"rank 0: ConfigError: data\.batch_size"):
        ranks.measure(replace(asked, train=replace(config, data=replace(config.data, batch_size=3))))


@pytest.mark.slow
def test_ranks_whose_messages_the_kernel_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are namespaces messages go through them; elsewhere one line says why not."""
    limit = ["overlap", f"--store={tmp_path / 'bench'}", "--namespace-bandwidth=100MiB"]
    small = ["--layers=2", "--forward-ms=1", "--computation=device", "--steps=1", "--warmup=1"]
    if probe_namespaces().available:
        assert bench_status(*limit, *small, "--json") == 0
        assert json.loads(capsys.readouterr().out)["namespace_bytes_per_s"] == 100 << 20
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bench_status(*limit) == 2
    assert capsys.readouterr().err == (
        "tierstore: error: --namespace-bandwidth: no network namespaces here: only root may create network namespaces\n"
    )
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow
def test_terminated_it_leaves_neither_files_nor_ranks(tmp_path: Path) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-m", "tierstore.cli.main", "bench", "overlap", f"--store={place}"]
    with subprocess.Popen(
        [*command, "--layers=3", "--forward-ms=5", "--computation=device"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        until = time.monotonic() + 60
        while not list(place.glob("run/*/tierstore.json")) and process.poll() is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err.decode()
    assert len(ranks) == 2
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
    assert not place.exists()
