"""What a user can get wrong: one clear line, exit status 2, and nothing created or changed."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import command_line
import pytest
import torch

from tierstore.config import dump
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

pytestmark = pytest.mark.usefixtures("forked_python")

Make = Callable[..., TrainConfig]
SHM = Path("/dev/shm")


def content(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything below ``root``: kind and bytes."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """Runs ``tierstore train`` over ``config``, which must be refused; returns the line."""

    def run(config: TrainConfig | None, *options: str) -> str:
        file = tmp_path / "run.toml"
        if config is not None:
            file.write_text(dump(config))
        elif not file.exists():
            file.write_text("")
        before = content(tmp_path)
        said = command_line.refused("train", file, *options)
        assert said.startswith("tierstore: error: ")
        assert said.count("\n") == 1
        assert content(tmp_path) == before
        return said

    return run


@pytest.fixture
def made(configure: Make) -> TrainConfig:
    """A store with two steps."""
    config = configure({"steps": 2})
    with open_session(config, Opening.CREATE) as trainer:
        trainer.step()
        trainer.step()
        trainer.commit()
    return config


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("model.widht=3", "model.widht"),
        ("colour=red", "colour"),
        ("steps=0", "steps"),
        ("steps=-4", "steps"),
        ("steps=many", "steps"),
        ("commit_every=-1", "commit_every"),
        ("data.batch_size=0", "batch_size"),
        ("data.micro_batches=-2", "micro_batches"),
        ("clip_norm=-0.5", "clip_norm"),
        ("clip_norm=nan", "clip_norm"),
        ("schedule.lr=-1", "lr"),
        ("schedule.warmup_steps=-1", "warmup_steps"),
        ("adamw.betas=0.9,1.5", "betas"),
        ("adamw.betas=0.9", "betas"),
        ("adamw.weight_decay=-1", "weight_decay"),
        ("adamw.inactive=sometimes", "inactive"),
        ("model.top_k=99", "top_k"),
        ("model.experts=0", "experts"),
        ("model.n_heads=3", "n_heads"),
        ("model.activation=relu", "activation"),
        ("cache.policy=random", "policy"),
        ("cache.options.half_life=0", "half_life"),
        ("cache.options.decay=0", "it has: "),
        ("prefetch.depth=-1", "depth"),
        ("prefetch.budget=2", "budget"),
        ("io.threads=0", "threads"),
        ("io.chunk_bytes=1000", "chunk_bytes"),
        ("io.direct=perhaps", "direct"),
        ("io.map_sync=on", "io.map_sync: on needs io.backend = pmem"),
        ("data.separator=\udcff", "separator: expected text in UTF-8"),
        ("host_budget=-5", "host_budget"),
        ("host_budget=1", "host_budget"),
        ("host_budget=lots", "host_budget"),
        ("host_budget=1KiB", "minimum is"),
        ("device_budget=1KiB", "minimum is"),
        ("snapshot_every=5", "retain"),
        ("device=abacus", "device"),
        ("max_skipped=0", "max_skipped"),
        ("nonsense", "nonsense"),
    ],
)
def test_values_that_cannot_be(option: str, said: str, configure: Make, refused: Callable[..., str]) -> None:
    assert said in refused(configure(), "--set", option)


def test_configuration_files(tmp_path: Path, refused: Callable[..., str]) -> None:
    file = tmp_path / "run.toml"
    for text, said in (
        ("steps = ", "TOML"),
        ("[model]\ncolour = 1\n", "model.colour"),
        ('steps = "x"\n', "steps"),
    ):
        file.write_text(text)
        line = refused(None)
        assert said in line
        assert str(file) in line


def test_data_that_is_not_there(configure: Make, refused: Callable[..., str], tmp_path: Path) -> None:
    missing, empty, short, folder = (tmp_path / name for name in ("missing", "empty", "short", "folder"))
    empty.write_bytes(b"")
    short.write_bytes(b"too short")
    folder.mkdir()
    for path in (missing, empty, short, folder):
        assert str(path) in refused(configure({"data.paths": (str(path),)}))
        assert str(path) in refused(configure(), "--data", str(path))


def restricted(restriction: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("restricted.py")), restriction, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_data_that_cannot_be_read(configure: Make, tmp_path: Path) -> None:
    unreadable = tmp_path / "unreadable"
    unreadable.write_bytes(b"words " * 10_000)
    unreadable.chmod(0)
    config = configure({"data.paths": (str(unreadable),)})
    (tmp_path / "run.toml").write_text(dump(config))
    done = restricted("no-override", "train", str(tmp_path / "run.toml"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"tierstore: error: {unreadable}: ")
    assert done.stderr.count("\n") == 1
    assert not config.store.exists()


@pytest.mark.slow
def test_without_io_uring(configure: Make, tmp_path: Path) -> None:
    """ON is refused, AUTO falls back to threads and says so."""
    config = configure({"steps": 1})
    (tmp_path / "run.toml").write_text(dump(config))
    refused = restricted("no-uring", "train", str(tmp_path / "run.toml"), "--set", "io.backend=uring")
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.startswith("tierstore: error: ")
    assert "io_uring" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not config.store.exists()
    done = restricted("no-uring", "train", str(tmp_path / "run.toml"))
    assert done.returncode == 0, done.stderr
    line = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("I/O: "))
    assert line.startswith("I/O: threads (")


def test_a_bare_run_on_a_store_names_the_ways_on(made: TrainConfig, refused: Callable[..., str]) -> None:
    line = refused(made)
    assert "--resume" in line
    assert "--store" in line


def test_resume_on_nothing(configure: Make, refused: Callable[..., str], tmp_path: Path) -> None:
    config = configure()
    assert str(config.store) in refused(config, "--resume")
    config.store.mkdir()
    assert str(config.store) in refused(config, "--resume")
    (config.store / "notes.txt").write_text("not a store")
    assert str(config.store) in refused(config, "--resume")
    assert "notes.txt" in refused(config)  # nor is another's directory taken over
    (tmp_path / "file").write_text("")
    refused(configure({"store": tmp_path / "file"}))


@pytest.mark.parametrize(
    "changes",
    [
        {"model.experts": 13},
        {"model.d_ff": 48},
        {"model.n_layers": 3},
        {"model.d_model": 32},
        {"model.compute_dtype": "bf16"},
    ],
)
def test_a_store_of_another_shape(
    changes: Mapping[str, Any], made: TrainConfig, configure: Make, refused: Callable[..., str]
) -> None:
    line = refused(configure({"store": made.store, "steps": 4} | dict(changes)), "--resume")
    assert str(made.store) in line


def test_a_store_of_another_version(made: TrainConfig, refused: Callable[..., str]) -> None:
    path = made.store / "tierstore.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))
    assert "99" in refused(made, "--resume")
    path.write_text("{")
    assert str(path) in refused(made, "--resume")


def test_a_store_in_use(made: TrainConfig, refused: Callable[..., str]) -> None:
    with open_session(made, Opening.RESUME):
        assert str(made.store) in refused(made, "--resume")


def takes_direct_io(directory: Path) -> bool:
    probe = directory / "tierstore-test-probe"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def test_cuda_where_there_is_none(configure: Make, refused: Callable[..., str]) -> None:
    config = configure({"device": "cuda"})
    if not torch.cuda.is_available():
        assert "cuda" in refused(config)
    assert not config.store.exists()


def test_direct_io_where_there_is_none(configure: Make, refused: Callable[..., str]) -> None:
    """tmpfs takes O_DIRECT only from Linux 6.6 on. ON is refused, AUTO falls back and says so."""
    if not SHM.is_dir():
        return
    direct = takes_direct_io(SHM)
    with ExitStack() as stack:
        directory = SHM / "tierstore-test"
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        if not direct:
            assert str(directory) in refused(configure({"store": directory, "io.direct": "on"}))
            assert not directory.exists()
        with open_session(configure({"store": directory}), Opening.CREATE) as trainer:
            trainer.step()
            line = next(line for line in trainer.store.describe() if line.startswith("direct I/O"))
        assert line == "direct I/O: on" if direct else line.startswith("direct I/O: off (")
