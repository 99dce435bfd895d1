"""tierstore bench, end to end on tiny sizes: what it prints what must hold. No test asserts a speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tierstore.bench.processes.namespaces import probe_namespaces
from tierstore.bench.results.document import load_document
from tierstore.cli.main import cli

TINY = [
    *("model.d_model=32", "model.d_ff=64", "model.n_layers=2", "model.n_heads=2", "model.experts=8"),
    *("model.seq_len=16", "data.batch_size=2", "threads=1"),
]


def bench(*args: str | Path) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *map(str, args)])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def tiny(tmp_path: Path, *args: str) -> list[str]:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 2048)
    settings = [f"--set={setting}" for setting in (*TINY, f"data.paths={text}")]
    return [
        "train",
        f"--store={tmp_path / 'bench'}",
        "--steps=2",
        "--warmup=1",
        "--rounds=2",
        *settings,
        *args,
    ]


def last_object(out: str) -> dict[str, Any]:
    found = json.loads(out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved.json"
    assert bench(*tiny(tmp_path, "--host-budget=300KiB", "--json", f"--save={saved}")) == 0
    out, err = capfd.readouterr()
    found = last_object(out)
    assert found["same_losses"] is True
    assert found["in_ram"]["step_read_bytes"] == found["in_ram"]["step_written_bytes"] == 0
    assert found["in_ram"]["hit_ratio"] == 1
    assert found["tiered"]["step_read_bytes"] > 0
    moved = found["compulsory_read_bytes"] + found["compulsory_written_bytes"]
    assert 0 < moved <= min(policy["step_moved_bytes"] for policy in found["policies"]) + 1
    assert found["bound_s"] > 0
    assert found["step_to_bound_ratio"] > 0
    assert "step / bound" in err
    listed = {one.label: one for one in load_document(saved).measurements}
    assert listed["step (run=in ram)"].count == listed["step (run=tiered)"].count == 4
    assert listed["step to bound"].median == pytest.approx(found["step_to_bound_ratio"])
    assert listed["step to bound"].target == 1.15
    assert not (tmp_path / "bench").exists()


@pytest.mark.slow
def test_other_losses_than_in_ram_are_status_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierstore.bench.training import run as training

    monkeypatch.setattr(training, "_same_losses", lambda tiered, whole: False)
    assert bench(*tiny(tmp_path, "--host-budget=300KiB")) == 1
    assert "same losses: NO" in capfd.readouterr().out


@pytest.mark.slow
def test_train_without_a_baseline(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(*tiny(tmp_path, "--host-budget=300KiB", "--baseline=none")) == 0
    out = capfd.readouterr().out
    assert "in RAM" not in out
    assert "step / time of compulsory bytes" in out
    assert "peak resident memory" in out


@pytest.mark.slow
def test_a_failure_of_a_training_process_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(*tiny(tmp_path, "--host-budget=4KiB")) == 2
    err = capfd.readouterr().err.splitlines()
    assert err[-1].startswith("tierstore: error: tiered: BudgetError: host_budget")
    assert not (tmp_path / "bench").exists()


def test_a_directory_that_exists_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench").mkdir()
    assert bench(*tiny(tmp_path)) == 2
    assert "wants a directory of its own" in capfd.readouterr().err
    assert (tmp_path / "bench").is_dir()


@pytest.mark.slow
def test_overlap(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small = ["--layers=2", "--forward-ms=1", "--computation=device", "--steps=1", "--warmup=1"]
    saved = tmp_path / "saved.json"
    assert bench("overlap", *small, f"--store={tmp_path / 'bench'}", "--json", f"--save={saved}") == 0
    out, err = capfd.readouterr()
    found = last_object(out)
    assert [run["prefetch"] for run in found["runs"]] == ["both"] * 4 + [
        "horizontal only",
        "vertical only",
        "none",
    ]
    assert "/ longest" in err
    listed = [one for one in load_document(saved).measurements if one.name == "step to the longest"]
    assert [one.target for one in listed] == [1.15, 1.05, 1.05, 1.05, None, None, None]
    assert [one.median for one in listed] == pytest.approx([run["ratio"] for run in found["runs"]])


@pytest.mark.slow
def test_ranks_whose_messages_the_kernel_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are namespaces messages go through them; elsewhere one line says why not."""
    limit = ["overlap", f"--store={tmp_path / 'bench'}", "--namespace-bandwidth=1MiB"]
    small = ["--layers=2", "--forward-ms=1", "--computation=device", "--steps=1", "--warmup=1"]
    if probe_namespaces().available:
        assert bench(*limit, *small, "--json") == 0
        assert last_object(capsys.readouterr().out)["namespace_bytes_per_s"] == 1 << 20
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert bench(*limit) == 2
    assert capsys.readouterr().err == (
        "tierstore: error: --namespace-bandwidth: no network namespaces here: only root may make network namespaces\n"
    )
    assert not (tmp_path / "bench").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["machine", "{nowhere}/profile.json"], "PROFILE: there is no directory {nowhere}"),
        (["overlap", "--store={here}/b", "--svg={nowhere}/a.svg"], "--svg: there is no directory {nowhere}"),
        (
            ["overlap", "--store={here}/b", "--timeline={nowhere}/t.json"],
            "--timeline: there is no directory {nowhere}",
        ),
        (["overlap", "--store={here}/b", "--layers=0"], "layers: expected at least 1, got 0"),
        (["overlap", "--store={here}/b", "--forward-ms=0"], "forward_s: expected more than 0, got 0.0"),
        (["commit", "--store={here}/b", "--record-bytes=8"], "record_bytes: expected at least 12, got 8"),
        (["tiers", "--store={here}/b", "--seconds=0"], "seconds: expected more than 0, got 0"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    places = {"here": tmp_path, "nowhere": tmp_path / "nowhere"}
    assert bench(*(arg.format(**places) for arg in args)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said.format(**places) in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_terminated_it_leaves_neither_files_nor_ranks(tmp_path: Path) -> None:
    place = tmp_path / "place"
    command = [sys.executable, "-m", "tierstore.cli.main", "bench", "overlap", f"--store={place}"]
    with subprocess.Popen(
        [*command, "--forward-ms=5", "--computation=device"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
