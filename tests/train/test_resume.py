"""Runs that end early, in processes of their own: killed at any moment, or stopped by a signal.

Whatever happens, ``--resume`` ends in the losses and the checksum of the run that nothing happened to.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import share
from forked_python import ForkServer

from tierstore.config import dump
from tierstore.train.config import TrainConfig

Make = Callable[..., TrainConfig]


class Process:
    """One ``tierstore train``."""

    def __init__(self, config: TrainConfig, directory: Path, *options: str) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self.metrics = directory / "metrics.jsonl"
        (directory / "run.toml").write_text(dump(config))
        argv = ["train", str(directory / "run.toml"), "--json", "--checksum", "--metrics", str(self.metrics)]
        command = [sys.executable, "-m", "tierstore.cli.main", *argv, *options]
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self._process = subprocess.Popen(command, stdout=out, stderr=err)
        self.kill, self.wait = self._process.send_signal, self._process.wait

    @property
    def errors(self) -> str:
        return (self._directory / "err").read_text()

    def summary(self) -> dict[str, Any]:
        return json.loads((self._directory / "out").read_text().splitlines()[-1])

    def losses(self) -> list[tuple[int, float]]:
        """(step, loss) as written so far, repeated steps included."""
        if not self.metrics.exists():
            return []
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines() if line.endswith("}")]
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]


Start = Callable[..., Process]


@pytest.fixture
def start(forked_python: None, tmp_path: Path) -> Start:
    def begin(config: TrainConfig, *options: str, name: str = "run") -> Process:
        return Process(config, tmp_path / name, *options)

    return begin


TIGHT = {
    "steps": max(24, share(40)),
    "host_budget": "192KiB",
    "model.top_k": 1,
    "model.experts": 16,
    "data.batch_size": 1,
    "prefetch.depth": 2,
}


Expected = tuple[dict[int, float], dict[str, Any]]
Undisturbed = Callable[[TrainConfig], Expected]


@pytest.fixture(scope="module")
def undisturbed(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Losses and summary of a run that nothing happens to, each computed once: when it commits changes neither."""
    known: dict[str, Expected] = {}

    def run(config: TrainConfig) -> Expected:
        config = replace(config, store=Path("store"), commit_every=0)
        if repr(config) not in known:
            directory = tmp_path_factory.mktemp("undisturbed")
            with fork_server.forking():
                process = Process(replace(config, store=directory / "store"), directory)
            assert process.wait() == 0, process.errors
            losses, summary = process.losses(), process.summary()
            assert [step for step, _ in losses] == list(range(1, config.steps + 1))
            assert isinstance(summary["records_crc32c"], int)
            known[repr(config)] = dict(losses), summary
        return known[repr(config)]

    return run


def agree(process: Process, expected: Expected) -> None:
    losses, summary = expected
    seen = process.losses()
    assert {step for step, _ in seen} == set(losses)
    assert all(loss == losses[step] for step, loss in seen), "a step was repeated with another loss"
    found = process.summary()
    for key in ("records_crc32c", "train_loss", "val_loss", "steps"):
        assert found[key] == summary[key], key


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_norm": 0.3, "data.micro_batches": 2}, {"data.micro_batches": 2, "data.micro_order": "layer"}],
    ids=["immediate", "clip", "layer"],
)
def test_killed_at_random_moments(
    changes: Mapping[str, Any], configure: Make, start: Start, undisturbed: Undisturbed
) -> None:
    """After a random number of steps and a random part of one, inside commits too. TIERSTORE_TEST_KILLS: how often (10)."""
    chance = random.Random(20)
    config = configure(TIGHT | {"commit_every": 2} | changes)
    expected = undisturbed(config)
    begun = False
    for _ in range(int(os.environ.get("TIERSTORE_TEST_KILLS", share(10)))):
        process = start(replace(config, commit_every=chance.randint(1, 3)), *(["--resume"] if begun else []))
        before = len(process.losses())
        wanted = before + chance.randint(1, 3)
        deadline = time.monotonic() + 60
        while len(process.losses()) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        process.kill(signal.SIGKILL)
        ended = process.wait()
        if ended == 0:  # it was quicker than this process
            agree(process, expected)
            return
        assert ended == -signal.SIGKILL, process.errors
        begun = True
    process = start(config, "--resume")
    assert process.wait() == 0, process.errors
    agree(process, expected)


@pytest.mark.slow
def test_killed_while_it_creates(configure: Make, start: Start, undisturbed: Undisturbed) -> None:
    """Before the first commit there is no store: the next bare run starts afresh."""
    config = configure(TIGHT | {"steps": 3})
    expected = undisturbed(config)
    chance = random.Random(3)
    killed = 0
    for _ in range(2):
        process = start(config)
        deadline = time.monotonic() + 30
        while not (config.store / "lease").exists() and time.monotonic() < deadline:
            pass
        time.sleep(chance.random() * 0.003)
        process.kill(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.errors
        if (config.store / "tierstore.json").exists():
            break
        killed += 1
        refused = start(config, "--resume", name="refused")
        assert refused.wait() == 2
        assert "no store here" in refused.errors
    assert killed
    if (config.store / "tierstore.json").exists():
        return
    process = start(config)
    assert process.wait() == 0, process.errors
    agree(process, expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_commits_and_exits(
    number: int, configure: Make, start: Start, undisturbed: Undisturbed
) -> None:
    config = configure(TIGHT)
    expected = undisturbed(config)
    process = start(config)
    deadline = time.monotonic() + 60
    while len(process.losses()) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill(number)
    assert process.wait() == 130, process.errors
    stopped = process.summary()["steps"]
    assert 3 <= stopped < config.steps
    assert process.losses()[-1][0] == stopped
    process = start(config, "--resume")
    assert process.wait() == 0, process.errors
    assert len(process.losses()) == config.steps, "no step was lost or repeated"
    agree(process, expected)
