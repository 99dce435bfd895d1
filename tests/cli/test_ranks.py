"""The command under ``torchrun``: real launches, a rank that dies, restarts, and stores of several ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = """
steps = {steps}
host_budget = "4MiB"
commit_every = 2
eval_every = 0
eval_batches = 1
sample_tokens = 0
threads = 1
device = "cpu"
[model]
d_model = 16
n_layers = 2
n_heads = 2
seq_len = 8
d_ff = 32
experts = 6
[data]
batch_size = 4
paths = ["{text}"]
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "words.txt"
    text.write_text(" ".join(f"word{i % 97}" for i in range(8000)))
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(steps=4, text=text))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tierstore.cli.main", *map(str, arguments)]


def torchrun(*arguments: str | Path, ranks: int = 2, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, f"--max-restarts={restarts}", "-m", "tierstore.cli.main", *map(str, arguments)]


def run(line: list[str], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout, check=False)


def last_json(text: str) -> dict[str, object]:
    found = json.loads(text.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_two_ranks_reshard_to_one_and_verify(config: Path, tmp_path: Path) -> None:
    store, one = tmp_path / "two", tmp_path / "one"
    metrics = tmp_path / "metrics.jsonl"
    two = run(torchrun("train", config, "--store", store, "--metrics", metrics, "--json"))
    assert two.returncode == 0, two.stderr
    alone = run(command("train", config, "--store", tmp_path / "alone", "--json"))
    found, expected = last_json(two.stdout), last_json(alone.stdout)
    assert found["ranks"] == 2
    assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert found["read_bytes"] == expected["read_bytes"] == 0
    assert "ranks: 2, in 1 expert group of 2" in two.stderr
    assert two.stderr.count("memory: host budget") == 1, "one rank speaks for all"
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (metrics, tmp_path / "metrics.rank-0001.jsonl")
    ]
    assert [[line["loss"] for line in rank] for rank in lines] == [[line["loss"] for line in lines[0]]] * 2

    refused = run(command("train", config, "--store", store, "--resume"))
    assert refused.returncode == 2
    assert "the store of 2 ranks, and this run has 1; tierstore reshard" in refused.stderr
    made = run(command("reshard", store, "--to", one, "--ranks", 1, "--json"))
    assert made.returncode == 0, made.stderr
    assert last_json(made.stdout)["ranks_before"] == 2
    for path in (store, one):
        checked = run(command("verify", path, "--json"))
        assert checked.returncode == 0
        assert last_json(checked.stdout)["failures"] == []
    resumed = run(command("train", config, "--store", one, "--resume", "--steps", 6, "--json"))
    assert resumed.returncode == 0, resumed.stderr
    again = run(command("reshard", store, "--to", one, "--ranks", 1))
    assert again.returncode == 2
    assert "there is something here already" in again.stderr
    with (store / "rank-0001" / "extents" / "expert.weights").open("r+b") as extent:
        extent.seek(200)
        byte = extent.read(1)
        extent.seek(200)
        extent.write(bytes([byte[0] ^ 1]))
    damaged = run(command("verify", store))
    assert damaged.returncode == 1
    assert "rank-0001" in damaged.stdout


def ranks_of(parent: int) -> list[int]:
    """The live processes that ``torchrun`` started, in the order of their ranks."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        pid for pid in map(int, children) if "tierstore.cli.main" in Path(f"/proc/{pid}/cmdline").read_text()
    ]


def wait_for(path: Path, lines: int) -> None:
    deadline = time.monotonic() + 90
    while not (path.exists() and len(path.read_text().splitlines()) >= lines):
        assert time.monotonic() < deadline, f"{path} did not get {lines} lines"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_is_killed(config: Path, tmp_path: Path, restarts: int) -> None:
    """Without restarts the job ends with the reason; with one it goes on, and ends in the same bits."""
    steps, store, metrics = 60, tmp_path / "store", tmp_path / "metrics.jsonl"
    expected = tmp_path / "expected.jsonl"
    straight = torchrun(
        "train",
        config,
        "--store",
        tmp_path / "straight",
        "--steps",
        steps,
        "--metrics",
        expected,
        "--json",
        "--checksum",
    )
    whole = last_json(run(straight).stdout) if restarts else {}
    line = torchrun(
        *("train", config, "--store", store, "--steps", steps, "--metrics", metrics, "--json", "--checksum"),
        restarts=restarts,
    )
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(metrics, 5)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    if not restarts:
        assert process.returncode != 0
        assert "rank 1 failed: its process ended" in err
        return
    assert process.returncode == 0, err
    found = last_json(out)
    assert (found["steps"], found["train_loss"]) == (steps, whole["train_loss"])
    assert isinstance(whole["records_crc32c"], int)
    assert found["records_crc32c"] == whole["records_crc32c"]
    seen = {entry["step"]: entry["loss"] for entry in map(json.loads, metrics.read_text().splitlines())}
    want = {entry["step"]: entry["loss"] for entry in map(json.loads, expected.read_text().splitlines())}
    assert seen == want


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_a_commit(config: Path, tmp_path: Path) -> None:
    store, metrics = tmp_path / "store", tmp_path / "metrics.jsonl"
    line = torchrun("train", config, "--store", store, "--steps", 100_000, "--metrics", metrics, "--json")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(metrics, 3)
        os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    found = last_json(out)
    assert "committed; continue with --resume" in err
    resumed = run(
        torchrun(
            "train", config, "--store", store, "--steps", int(str(found["steps"])) + 1, "--resume", "--json"
        )
    )
    assert resumed.returncode == 0, resumed.stderr
    assert last_json(resumed.stdout)["steps"] == int(str(found["steps"])) + 1


def test_a_world_that_is_half_set_is_refused(config: Path, tmp_path: Path) -> None:
    environ = {**os.environ, "RANK": "0"}
    done = subprocess.run(
        command("train", config, "--store", tmp_path / "s"),
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.returncode == 2
    assert "WORLD_SIZE" in done.stderr
    assert not (tmp_path / "s").exists()
