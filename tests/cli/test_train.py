"""``tierstore train`` as a user sees it: object, table, metrics, timeline, trace, snapshots, resumption."""

import errno
import io
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import Result
from command_line import invoke, object_of, tiny_run

from tierstore.cli import train as train_command
from tierstore.cli.output import ProgressBar
from tierstore.devices import Disk, Health
from tierstore.store import ParameterStore, StoreConfig
from tierstore.store.core import StoreCore
from tierstore.trace.files import TraceWriter
from tierstore.trace.replay import replay
from tierstore.train.report import MetricsLog

#: What the contract promises at least.
PROMISED = {
    *("steps", "train_loss", "val_loss", "tokens_per_s", "parameters", "experts", "record_bytes"),
    *("host_budget_bytes", "peak_resident_bytes", "fixed_resident_bytes", "read_bytes", "written_bytes"),
    *("hits", "misses", "evictions", "stall_s", "records_crc32c"),
}


class Run:
    def __init__(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.store = tmp_path / "store"
        self.file = tiny_run(tmp_path, {"steps": 6, "commit_every": 2, "eval_every": 3, "sample_tokens": 8})

    def invoke(self, *options: object, store: Path | None = None) -> Result:
        return invoke("train", self.file, "--store", store or self.store, *options)

    def __call__(self, *options: object, store: Path | None = None) -> Result:
        result = self.invoke(*options, store=store)
        assert result.exit_code == 0, (result.stderr, result.exception)
        return result

    def json(self, *options: object, store: Path | None = None) -> dict[str, Any]:
        (line,) = self("--json", *options, store=store).stdout.splitlines()
        return json.loads(line)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_json_object(run: Run) -> None:
    found = run.json()
    assert set(found) >= PROMISED
    assert (found["steps"], found["experts"], found["host_budget_bytes"]) == (6, 16, 192 << 10)
    assert found["record_bytes"] == 16 * 3 * 16 * 32 * 12
    assert found["peak_resident_bytes"] > found["host_budget_bytes"]
    assert 0 < found["train_loss"] < 7
    assert 0 < found["val_loss"] < 7
    assert found["misses"] > 0


def test_the_host_budget_is_what_memory_leaves(run: Run) -> None:
    """A host budget in the file wins; the loss is the same."""
    given = run.json("--memory", "2GiB")
    assert given["host_budget_bytes"] == 192 << 10
    left = run.json("--memory", "2GiB", "--host-budget", "0", store=run.directory / "left")
    assert left["memory"]["announced_bytes"] == 2 << 30
    assert left["host_budget_bytes"] == (2 << 30) - left["fixed_resident_bytes"]
    assert left["train_loss"] == given["train_loss"]


def test_the_table_and_the_head_of_a_run(run: Run) -> None:
    out = run().stdout
    for said in (
        "host budget",
        "memory: ",
        "data: ",
        "I/O: ",
        "direct I/O: ",
        "evictions",
        "peak resident",
        "sample: def ",
    ):
        assert said in out


def test_the_policy_is_named_and_a_starving_one_warned_about(run: Run) -> None:
    plain = run().stdout
    assert "cache policy: next-use, global scope" in plain
    assert "warning" not in plain
    starving = run(
        "--set",
        "cache.policy=lfu-decay",
        "--set",
        "cache.options.threshold=2",
        store=run.directory / "starving",
    ).stdout
    assert "warning: cache.options.threshold = 2 with a half-life of 8" in starving


def test_the_order_of_micro_batches_is_named(run: Run) -> None:
    """Small experts on a fast disk: layer order moves less, and its time is that of computing again."""
    four = ("--set", "data.micro_batches=4", "--set", "steps=1", "--set", "sample_tokens=0")
    assert run.json("--steps", "1")["micro_order"] == "micro"
    auto = run(*four, "--set", "links.disk.bandwidth=1MiB", store=run.directory / "auto").stdout
    assert "order of 4 micro-batches: layer (auto: a step moves " in auto
    assert "block inputs: spilled to disk" in auto
    spilled = run.json(
        *four,
        *("--set", "data.micro_order=layer", "--set", "boundary_budget=16KiB"),
        store=run.directory / "spilled",
    )
    assert (spilled["micro_order"], spilled["micro_order_reason"]) == ("layer", "as configured")
    assert spilled["boundary_written_bytes"] == spilled["boundary_read_bytes"] == 4 * 4096


def test_metrics_have_a_line_for_each_step(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    summary = run.json("--metrics", path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] == summary["train_loss"]
    assert [line["step"] for line in lines if line["val_loss"] is not None] == [3]
    for name in ("hits", "misses", "evictions", "read_bytes"):
        assert 0 < sum(line[name] for line in lines) <= summary[name]
    for name in ("wall_s", "computing_s", "stall_s"):
        each = [line["step_time"][name] for line in lines]
        assert summary["step_time"][name] == pytest.approx(sum(each))


def test_the_parts_of_the_steps_add_up(run: Run) -> None:
    found = run.json()["step_time"]
    named = (*("computing_s", "run_queue_s", "stolen_s", "device_s", "threads_s", "stall_s"), "unaccounted_s")
    assert sum(found[name] or 0.0 for name in named) == pytest.approx(found["wall_s"])
    assert sum(stall["stall_s"] for stall in found["stalls"]) == pytest.approx(found["stall_s"])
    shown = run(store=run.directory / "shown").stdout
    assert re.search(r"^create experts (\d+)/\1$", shown, re.MULTILINE)
    assert re.search(r"^step time: ", shown, re.MULTILINE)
    assert re.search(r"^where .* of steps went$", shown, re.MULTILINE)
    assert re.search(r"^computing +[\d.]+ m?s +[\d.]+%$", shown, re.MULTILINE)


def test_a_timeline_and_a_trace(run: Run, tmp_path: Path) -> None:
    timeline, trace = tmp_path / "timeline.json", tmp_path / "trace"
    summary = run.json("--timeline", timeline, "--record-trace", trace)
    events = json.loads(timeline.read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = {event["name"] for event in events}
    assert {"forward 0.0", "backward 5.0", "validation"} <= names
    assert any(name.startswith("commit") for name in names)
    stalls = {(stall["cause"], stall["intervals"]) for stall in summary["stalls"]}
    drawn = [event["name"] for event in events if event.get("ph") == "X"]
    assert ("data", 6) in stalls
    assert all(drawn.count(cause) >= 1 for cause, _ in stalls)
    stats = replay(trace)  # both end with the last commit
    for name in ("hits", "misses", "evictions", "read_bytes", "written_bytes"):
        assert getattr(stats, name) == summary[name], name
    assert stats.steps == 6


@pytest.mark.parametrize("what", ["--metrics", "--timeline", "--record-trace", "standard error"])
def test_a_full_disk_beside_the_store_loses_no_step(
    run: Run, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps end at the one whose output could not be written, which is committed. The rest is as if nothing had been."""
    expected = run.json("--checksum", store=tmp_path / "whole")
    monkeypatch.setattr("tierstore.timeline._BUFFER_BYTES", 1)
    monkeypatch.setattr("tierstore.trace.files._BUFFER_ROWS", 4)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    path = tmp_path / "run.trace" if what == "--record-trace" else Path("/dev/full")
    with monkeypatch.context() as patched:
        if what == "--record-trace":
            patched.setattr(TraceWriter, "extend", Mock(side_effect=full))
        elif what == "standard error":
            # Shows a step's loss and so on.
            patched.setattr("tierstore.cli.output._shown", Mock(side_effect=full))
        given = [what, path] if what.startswith("--") else []
        result = run.invoke("--json", "--set", "commit_every=0", *given)
    assert (result.exit_code, result.stdout) == (2, "")
    named = path if given else what
    *_, ended, error = result.stderr.splitlines()
    assert error == f"tierstore: error: {named}: No space left on device"
    assert ended == "ended after step 1, committed; continue with --resume"
    assert not (tmp_path / "run.trace").exists()
    resumed = run.json("--resume", "--checksum")
    assert resumed["records_crc32c"] == expected["records_crc32c"]
    assert resumed["train_loss"] == expected["train_loss"]


def test_a_line_of_metrics_is_whole_or_not_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes half of the third line."""
    path = tmp_path / "metrics.jsonl"
    lines: list[Any] = []

    class Full(io.FileIO):
        def write(self, data: Any, /) -> int:
            lines.append(data)
            if len(lines) < 3:
                return super().write(data)
            if len(lines) == 3:
                return super().write(data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = MetricsLog.__init__

    def opened(log: MetricsLog, path: Path | None) -> None:
        original(log, path)
        if log._file is not None:
            log._file.close()
            log._file = Full(log._file.name, "a")

    monkeypatch.setattr(MetricsLog, "__init__", opened)
    result = run.invoke("--metrics", path)
    assert (result.exit_code, result.stderr) == (2, f"tierstore: error: {path}: No space left on device\n")
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_refused_run_touches_no_file(run: Run, tmp_path: Path) -> None:
    run("--steps", "2")
    before = {"metrics": '{"step": 1}\n', "timeline": '[\n{"ph":"M"}\n]\n', "record-trace": "tsrtrace"}
    there = {name: tmp_path / f"there.{name}" for name in before}
    for name, path in there.items():
        path.write_text(before[name])
    new = {name: tmp_path / f"new.{name}" for name in there}
    for files in (there, new):
        result = run.invoke(*(f"--{name}={path}" for name, path in files.items()))
        assert result.exit_code == 2
        assert "there is a store here already" in result.stderr
        assert result.stdout == ""
    assert {name: path.read_text() for name, path in there.items()} == before
    assert not any(path.exists() for path in new.values())


def test_a_refused_run_does_not_describe_the_model(run: Run) -> None:
    result = run.invoke("--resume")
    assert result.exit_code == 2
    assert result.stderr.startswith("tierstore: error: ")
    assert "no store here" in result.stderr
    assert result.stdout == ""


def test_after_the_last_commit_nothing_is_read_or_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run does not depend on the size of the store."""
    moved: list[tuple[int, int]] = []

    def spy(name: str) -> None:
        original = getattr(StoreCore, name)

        def called(store: StoreCore) -> None:
            stats = store.engine.stats()
            moved.append((stats["read_bytes"], stats["written_bytes"]))
            original(store)

        monkeypatch.setattr(StoreCore, name, called)

    spy("end_trace")  # right after the last commit
    spy("close")
    found = run.json("--set", "sample_tokens=0")
    assert moved[0] == moved[1]
    assert moved[0][1] > 0
    assert found["records_crc32c"] is None


def test_the_checksum_is_that_of_the_store(run: Run) -> None:
    result = run("--json", "--checksum")
    assert re.search(r"^checksum .*B/s", result.stderr, re.MULTILINE)  # progress, in plain lines
    with ParameterStore.open(run.store, StoreConfig(host_budget=1 << 20)) as store:
        assert json.loads(result.stdout)["records_crc32c"] == store.records_crc32c()


@pytest.mark.parametrize("label", ["create experts", "reserve memory"])
def test_a_signal_ends_the_creation_of_a_store(run: Run, monkeypatch: pytest.MonkeyPatch, label: str) -> None:
    """While memory is taken for it, or records are made: nothing is left, and the next start makes it."""
    update = ProgressBar.update

    def interrupted(bar: ProgressBar, *given: Any) -> None:
        update(bar, *given)
        if bar._label == label:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "update", interrupted)
        result = run.invoke("--host-budget", "1100MiB" if label == "reserve memory" else "256MiB")
    assert result.exit_code == 130
    assert "stopped by a signal before the first step" in result.stdout
    assert not run.store.exists()
    assert run.json()["steps"] == 6


def test_a_signal_ends_the_checksum(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = StoreCore.records_crc32c

    def interrupted(store: StoreCore, progress: Callable[[int, int], None]) -> int:
        signal.raise_signal(signal.SIGINT)
        return original(store, progress)

    monkeypatch.setattr(StoreCore, "records_crc32c", interrupted)
    result = run.invoke("--json", "--checksum")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["records_crc32c"] is None
    assert "stopped by a signal after step 6, committed" in result.stderr


def test_the_life_of_a_drive_is_what_the_run_wrote_in_its_time(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what is written after the run nor the time that it takes counts."""
    endurance = ("--set", "wear.endurance=1TB")
    plain = run.json(*endurance, store=run.directory / "plain")

    def writing(store: StoreCore, progress: Callable[[int, int], None]) -> int:
        key = next(key for key in store.records.keys if store.records.live(key).cached)
        with store.optimizer_step(1e-3) as step:
            step.update({key: np.ones(store.records.info(key).schema.numel, np.float32)})
        store.committer.commit()
        time.sleep(0.5)
        return 1

    monkeypatch.setattr(StoreCore, "records_crc32c", writing)
    found = run.json("--checksum", *endurance)
    assert found["drive_written_bytes"] == plain["drive_written_bytes"]
    for one in (plain, found):
        rate = one["drive_written_bytes"] / one["elapsed_s"]
        assert one["drive_life_s"] == pytest.approx(1e12 / rate)


def test_stopping_and_going_on(run: Run, tmp_path: Path) -> None:
    whole = run.json("--checksum", store=tmp_path / "whole")
    assert isinstance(whole["records_crc32c"], int)
    run("--steps", "4")
    resumed = run.json("--checksum", "--resume")
    for name in ("steps", "train_loss", "val_loss", "records_crc32c"):
        assert resumed[name] == whole[name]
    # Nothing is left to do: it says so without a step.
    again = run.json("--checksum", "--resume")
    assert again["records_crc32c"] == whole["records_crc32c"]


def test_where_the_rate_stays_at_its_lowest_is_said(run: Run, tmp_path: Path) -> None:
    warm = ("--set", "schedule.warmup_steps=2", "--metrics", tmp_path / "m.jsonl")
    assert "learning rate:" not in run(*warm, "--steps", "4").stdout
    assert (
        "learning rate: stays at its minimum, 0.0002, from step 5 on: it has decayed by schedule.total_steps = 4"
        in run(*warm, "--resume").stdout
    )
    rates = [json.loads(line)["lr"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert rates == pytest.approx(
        [1e-3, 2e-3, 2e-3, 1.1e-3, 2e-4, 2e-4]
    )  # by hand: half a cosine over steps 2 to 4


def test_snapshots_are_kept_and_verified(run: Run) -> None:
    run("--set", "snapshot_every=2", "--set", "retain=2")
    assert object_of("verify", run.store)["snapshots"] == 2


def test_a_flipped_bit_is_found(run: Run) -> None:
    """By verify, and by the run that reads it: status 1, naming the record."""
    run()
    extent = run.store / "extents" / "expert.moments"
    content = bytearray(extent.read_bytes())
    content = bytearray(byte ^ 1 if at % 4096 == 100 else byte for at, byte in enumerate(content))
    extent.write_bytes(content)
    for result in (invoke("verify", run.store), run.invoke("--resume", "--steps", "8")):
        assert result.exit_code == 1, (result.stdout, result.stderr)
        assert "expert.0" in result.stdout + result.stderr


def test_drives_change_where_bytes_lie_and_nothing_else(run: Run, tmp_path: Path) -> None:
    """Two drives against one, with a trace of each; then a third is added at a resumption."""
    one = run.json("--checksum", "--record-trace", tmp_path / "one.trace", store=tmp_path / "one")
    further = f"stripe.directories={tmp_path / 'b'}"
    two = run.json("--checksum", "--set", further, "--record-trace", tmp_path / "two.trace")
    assert isinstance(one["records_crc32c"], int)
    for name in ("train_loss", "val_loss", "records_crc32c", "hits", "misses", "evictions", "read_bytes"):
        assert two[name] == one[name]
    # Byte for byte: where a record lies is no part of a decision.
    assert (tmp_path / "one.trace").read_bytes() == (tmp_path / "two.trace").read_bytes()
    assert [drive["path"] for drive in two["drives"]] == [str(run.store), str(tmp_path / "b")]
    assert sum(drive["used_bytes"] for drive in two["drives"]) == one["drives"][0]["used_bytes"]
    assert all(drive["used_bytes"] > 0 for drive in two["drives"])
    assert sum(drive["share_ratio"] for drive in two["drives"]) == pytest.approx(1)

    third = f"stripe.directories={tmp_path / 'b'},{tmp_path / 'c'}"
    shown = run("--resume", "--steps", "8", "--set", third).stdout
    names = rf"{run.store} \d+%, {tmp_path / 'b'} \d+%, {tmp_path / 'c'} \d+%"
    assert re.search(rf"^drives: {names} of new records$", shown, re.MULTILINE)
    assert "\ndirectory " in shown
    found = object_of("verify", run.store)
    assert [Path(drive["path"]).name for drive in found["drives"]] == ["store", "b", "c"]
    assert sum(drive["read_bytes"] for drive in found["drives"]) == found["read_bytes"]


def test_a_disk_that_warns_is_named_at_the_head(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(name="nvme0n1", through=(), model="Worn", rotational=False, size_bytes=1, bus="nvme")
    monkeypatch.setattr(train_command, "disks_under", lambda directory: [disk])
    monkeypatch.setattr(
        train_command, "disk_health", lambda disk: Health(warnings=("it has gone read-only",))
    )
    shown = run("--steps", "1", "--set", f"stripe.directories={run.directory / 'b'}").stdout
    assert (
        f"\nwarning: {run.directory / 'b'} and {run.store} are on the same disk, nvme0n1: striping is no faster\n"
        in shown
    )
    assert f"\nwarning: nvme0n1 Worn under {run.store}: it has gone read-only\n" in shown
