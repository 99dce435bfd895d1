"""The command under ``torchrun``: real launches, a rank that dies, restarts, and stores of several ranks."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import done, invoke, object_of, refused, tiny_run
from conftest_store import flip_bit
from forked_python import ForkServer

pytestmark = pytest.mark.usefixtures("forked_python")

STEPS = 40


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"steps": STEPS, "commit_every": 2, "eval_every": 0, "data.batch_size": 4}
    return tiny_run(
        tmp_path_factory.mktemp("config"), {**settings, "host_budget": "4MiB", "model.experts": 6}
    )


def torchrun(*arguments: str | Path, ranks: int = 2, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, f"--max-restarts={restarts}", "-m", "tierstore.cli.main", *map(str, arguments)]


def last_json(text: str) -> dict[str, object]:
    return json.loads(text.splitlines()[-1])


@dataclass(frozen=True)
class TwoRanks:
    """A run of two ranks to its end: its directory, with ``store`` and ``metrics.jsonl``; its JSON; and what it said."""

    directory: Path
    found: dict[str, object]
    said: str

    def losses(self, name: str = "metrics.jsonl") -> dict[int, float]:
        return losses_of(self.directory / name)


def losses_of(metrics: Path) -> dict[int, float]:
    """By step; of a step that was taken twice, the later one."""
    return {line["step"]: line["loss"] for line in map(json.loads, metrics.read_text().splitlines())}


@pytest.fixture(scope="module")
def two(config: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    place = tmp_path_factory.mktemp("two")
    options = ("--store", place / "store", "--metrics", place / "metrics.jsonl", "--json", "--checksum")
    line = torchrun("train", config, *options)
    with fork_server.forking():
        ended = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return TwoRanks(place, last_json(ended.stdout), ended.stderr)


@pytest.mark.slow
def test_two_ranks_reshard_to_one_and_verify(config: Path, two: TwoRanks, tmp_path: Path) -> None:
    one, store = tmp_path / "one", tmp_path / "store"
    shutil.copytree(two.directory / "store", store)
    expected = object_of("train", config, "--store", tmp_path / "alone")
    assert two.found["ranks"] == 2
    assert two.found["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)
    assert two.found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
    assert two.found["read_bytes"] == expected["read_bytes"] == 0
    assert "ranks: 2, in 1 expert group of 2" in two.said
    assert two.said.count("\nmemory: ") == 1, "one rank speaks for all"
    assert two.losses("metrics.rank-0001.jsonl") == two.losses()

    said = refused("train", config, "--store", store, "--resume")
    assert "the store of 2 ranks, and this run has 1; tierstore reshard" in said
    assert object_of("reshard", store, "--to", one, "--ranks", 1)["ranks_before"] == 2
    for path in (store, one):
        assert object_of("verify", path)["failures"] == []
    done("train", config, "--store", one, "--resume", "--steps", STEPS + 2, "--json")
    assert "there is something here already" in refused("reshard", store, "--to", one, "--ranks", 1)
    flip_bit(store / "rank-0001" / "extents" / "expert.weights", 8 * 200)
    damaged = invoke("verify", store)
    assert damaged.exit_code == 1
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
def test_a_rank_that_is_killed(config: Path, two: TwoRanks, tmp_path: Path) -> None:
    """The other one tells the reason; both are started again, go on, and end in the same bits."""
    metrics = tmp_path / "metrics.jsonl"
    options = ("--store", tmp_path / "store", "--metrics", metrics, "--json", "--checksum")
    line = torchrun("train", config, *options, restarts=1)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(metrics, 5)
        os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "rank 1 failed: its process ended" in err
    found = last_json(out)
    assert isinstance(found["records_crc32c"], int)
    for name in ("steps", "train_loss", "records_crc32c"):
        assert found[name] == two.found[name]
    assert losses_of(metrics) == two.losses()


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
    stopped = last_json(out)["steps"]
    assert "committed; continue with --resume" in err
    made = object_of("reshard", store, "--to", tmp_path / "one", "--ranks", 1)
    assert made["step"] == stopped, "both ranks committed the step"
    steps = int(str(stopped)) + 1
    resumed = object_of("train", config, "--store", tmp_path / "one", "--resume", "--steps", steps)
    assert resumed["steps"] == steps


def test_a_world_that_is_half_set_is_refused(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "WORLD_SIZE" in refused("train", config, "--store", tmp_path / "s")
    assert not (tmp_path / "s").exists()
