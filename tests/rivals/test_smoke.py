"""Each race runs as its documentation calls it, at its smallest size, and what it saves can be compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import generation_race
import pytest
import race
import torch
import training_race
from click.testing import CliRunner, Result
from fake_disk import FakeDisk
from process import RivalProcess
from served_stores import store_of

from tierstore.bench.comparing import compare
from tierstore.bench.documents import load_document
from tierstore.errors import ConfigError

_SIZES = "d_model=16 n_heads=2 n_layers=2 seq_len=16 d_ff=32 experts=4 top_k=1 activation=gelu"
_RUN = "threads=1 host_budget=16MiB commit_every=0 data.paths=text data.batch_size=2"
SETTINGS = [*_RUN.split(), *(f"model.{size}" for size in _SIZES.split())]

pytestmark = pytest.mark.usefixtures("forked_python")


def run(*arguments: str) -> tuple[Result, dict[str, Any]]:
    done = CliRunner().invoke(race.race, [*arguments, "--json"], standalone_mode=False)
    lines = done.stdout.splitlines()
    return done, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


@pytest.mark.slow
def test_the_race_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch and tierstore with a Mixtral, which tierstore imports and wraps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_race, "StepDisk", FakeDisk)
    Path("text").write_bytes(bytes(range(32, 127)) * 40)
    done, found = run(
        *("train", "--rival", "torch", "--rival", "tierstore", "--model", "mixtral"),
        *("--steps", "1", "--warmup", "1", "--rounds", "1", "--save", "race.json"),
        *(part for setting in SETTINGS for part in ("--set", setting)),
    )
    assert done.return_value == 0, done.output
    assert [one["outcome"] for one in found["rivals"]] == ["ran", "ran"]
    losses = [one["losses"] for one in found["rivals"]]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    saved = load_document(Path("race.json"))
    assert (saved.bench, saved.options["rounds"]) == ("rivals", 1)
    assert len(compare(saved, saved).rows) == len(saved.measurements) > 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["race.json", "text"]


@pytest.mark.slow
def test_the_race_of_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tierstore, transformers and accelerate with a checkpoint, which tierstore imports; load at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generation_race, "PROBE_BYTES", 4 << 20)
    # With this process's policy, or the rivals could not be forked.
    monkeypatch.setattr(
        generation_race,
        "RivalProcess",
        lambda *given, **named: RivalProcess(*given, **named | {"omp_wait": "passive"}),
    )
    store_of(tmp_path, "qwen3_moe", torch.bfloat16)
    done, found = run(
        *("generate", "model", "--rivals", "tierstore,transformers,accelerate", "--memory", "0"),
        *[
            "--host-budget",
            "1MiB",
            "--batch",
            "2",
            "--prompt-tokens",
            "6",
            "--new-tokens",
            "4",
            "--rounds",
            "1",
        ],
        *["--threads", "1", "--load", "0.8", "--requests", "2", "--save", "race.json"],
    )
    assert done.return_value == 0, done.output
    assert [one["outcome"] for one in found["speeds"]] == ["ran"] * 3, done.output
    assert [one["chosen_same_ratio"] for one in found["speeds"]] == [1.0] * 3
    assert [one["batch_count"] for one in found["bounds"]] == [2]
    assert found["load"]["requests"] == 2
    assert len(load_document(Path("race.json")).measurements) > 6
    assert not Path("tierstore-bench").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("train --set model.capacity_factor=1", "model.router_noise, model.capacity_factor"),
        ("train --rival other", "rivals: expected one of torch"),
        ("generate . --batch two", "--batch"),
    ],
)
def test_what_cannot_be_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"^{named}"):
        race.race(arguments.split(), standalone_mode=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    """In a process of its own, as a user calls it."""
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, race.__file__, "train", "--rival", "other"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert re.fullmatch(r"race\.py: error: rivals: expected one of .*\n", done.stderr)
    assert not list(tmp_path.iterdir())
