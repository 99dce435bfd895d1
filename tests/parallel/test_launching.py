"""Joining under a real torchrun, alone, and where it cannot work; and what ends with torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tierstore.errors import CapabilityError, ConfigError, PeerError
from tierstore.parallel import ParallelConfig, RankEnvironment, launch, launching, rank_device

PROGRAM = """
import os, sys, time
import torch
from tierstore.parallel import ParallelConfig, launch

with launch(ParallelConfig(timeout_s=60, grace_s=1), device="cpu") as mesh:
    total = torch.tensor([float(mesh.world.rank + 1)])
    mesh.world.all_reduce(total).wait()
    os.write(1, f"rank {mesh.world.rank} of {mesh.world.size}: {total.item():g}\\n".encode())  # at once
    if sys.argv[1] == "fail" and mesh.world.rank == 1:
        raise ValueError("a reason of its own")
    if sys.argv[1] == "stay":
        os.write(1, f"pid {os.getpid()}\\n".encode())  # one write: lines of two ranks never mix
    if sys.argv[1] != "leave":
        time.sleep(120)
    several = len(os.listdir("/proc/self/task"))
left = len(os.listdir("/proc/self/task"))
assert left == 1 < several, f"{left} of {several} threads are left"
"""


def _torchrun(tmp_path: Path, what: str, ranks: int = 2) -> subprocess.Popen[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*command, str(program), what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_under_torchrun(tmp_path: Path) -> None:
    run = _torchrun(tmp_path, "leave")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2: 3", "rank 1 of 2: 3"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_failure_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    run = _torchrun(tmp_path, "fail")
    _, err = run.communicate(timeout=120)
    assert run.returncode != 0
    assert "tierstore: rank 0: rank 1 failed: ValueError: a reason of its own" in err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_a_killed_torchrun(tmp_path: Path, ranks: int) -> None:
    with _torchrun(tmp_path, "stay", ranks) as run:
        try:
            pids: list[int] = []
            while len(pids) < ranks:
                line = run.stdout.readline()
                assert line, "the ranks ended early"
                pids += [int(line.split()[1])] if line.startswith("pid") else []
        finally:
            run.kill()
        _, err = run.communicate(timeout=60)  # at the end of the last process that has the pipe
    assert run.returncode == -signal.SIGKILL
    assert "the job failed: the torchrun process that started this rank ended" in err
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_alone_needs_no_one() -> None:
    with launch(ParallelConfig(), device="cpu") as mesh:
        assert mesh.environment == RankEnvironment()
        assert mesh.world is mesh.expert is mesh.replica
        assert (mesh.world.size, mesh.replicas, mesh.device) == (1, 1, torch.device("cpu"))
        assert not torch.distributed.is_initialized()


def test_a_layout_that_cannot_be_is_refused_before_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^MASTER_ADDR, MASTER_PORT: not set"), launch(ParallelConfig()):
        pass
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with (
        pytest.raises(ConfigError, match=r"^parallel\.expert: expected a divisor of the 4 ranks, got 3"),
        launch(ParallelConfig(expert=3)),
    ):
        pass


def test_no_one_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    expected = r"joining: a rank failed: rank 1 of 2 could not join the others at 127\.0\.0\.1:9: "
    with pytest.raises(PeerError, match=expected), launch(ParallelConfig(timeout_s=1.0), device="cpu"):
        pass


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, third = RankEnvironment(), RankEnvironment(rank=2, world=4, local_rank=2)
    for asked in ("tpu", "cuda:x", "cpu:0", "auto:1"):
        with pytest.raises(ConfigError, match=f"^device: expected auto, cpu, cuda or cuda:N, got '{asked}'"):
            rank_device(asked, alone)
    assert rank_device("cpu", third) == torch.device("cpu")
    monkeypatch.setattr(launching, "accelerator_type", lambda: None)
    assert rank_device("auto", third) == torch.device("cpu")
    with pytest.raises(
        CapabilityError, match=r"^device: cuda was requested, but torch .* finds no CUDA device"
    ):
        rank_device("cuda", alone)
    monkeypatch.setattr(launching, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(launching, "device_count", lambda: 2)
    assert rank_device("auto", alone) == torch.device("cuda", 0)
    assert rank_device("cuda:1", alone) == torch.device("cuda", 1)
    assert rank_device("cuda", RankEnvironment(rank=5, world=8, local_rank=1)) == torch.device("cuda", 1)
    with pytest.raises(
        ConfigError, match=r"^device: cuda:0 is one GPU for 4 ranks; expected auto, cpu or cuda"
    ):
        rank_device("cuda:0", third)
    with pytest.raises(ConfigError, match=r"^device: no GPU 9; this machine has 2"):
        rank_device("cuda:9", alone)
    with pytest.raises(ConfigError, match=r"^LOCAL_RANK: 2 needs GPU 2; this machine has 2"):
        rank_device("cuda", third)
    monkeypatch.setattr(launching, "device_count", lambda: 1)  # as launchers do that show each rank its own
    assert rank_device("cuda", third) == torch.device("cuda", 0)


def test_a_process_alone_starts_no_thread_and_imports_no_backend() -> None:
    program = """
import sys, threading, torch
before = set(sys.modules)
from tierstore.parallel import ParallelConfig, launch
with launch(ParallelConfig(), device="cpu"):
    added = sorted(name for name in set(sys.modules) - before if name.startswith("torch."))
    assert not added, added
    assert threading.active_count() == 1
"""
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environ)
