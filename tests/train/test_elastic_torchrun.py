"""``torchrun`` with nodes that come and go, for real: agents of one rank each on this machine, and no person between."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launcher import Ranks
from rank_cases import TINY, Make, Settings, alone, train

from tierstore.parallel import ParallelConfig
from tierstore.parallel.layout import free_port, layout_of
from tierstore.train.ranks import Opening
from tierstore.train.resharding import reshard

#: Agents take a silent one for dead after 2 x 2 seconds, and wait a second for others; by default 15 and 30.
QUICK = "keep_alive_interval=2,keep_alive_max_attempt=2,last_call_timeout=1"
_WAIT_S = 120.0


@dataclass
class Agents:
    """The ``torchrun`` processes of one job."""

    directory: Path
    environ: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    def start(self, *arguments: str | Path, address: str) -> subprocess.Popen[bytes]:
        """One more agent, at ``address``: of two, rank 0 is on the one whose address comes first."""
        launcher = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={self.directory}"),
            *(f"--rdzv-conf={QUICK}", f"--local-addr={address}", "--max-restarts=3"),
            *("-m", "tierstore.cli.main", *map(str, arguments)),
        ]
        number = len(self.started)
        with self.said(number).open("wb") as err, self.printed(number).open("wb") as out:
            process = subprocess.Popen(
                launcher, stdout=out, stderr=err, env={**os.environ, **self.environ}, start_new_session=True
            )
        self.started.append(process)
        return process

    def said(self, number: int) -> Path:
        """What agent ``number`` and its ranks wrote to stderr."""
        return self.directory / f"agent-{number}.err"

    def printed(self, number: int) -> Path:
        """What its ranks wrote to stdout."""
        return self.directory / f"agent-{number}.out"

    def end(self) -> None:
        """Kills all that is left."""
        for process in self.started:
            kill(process)
            process.wait()


def ranks_under(agent: subprocess.Popen[bytes]) -> list[int]:
    """The live processes of an agent's ranks."""
    try:
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        return [
            pid
            for pid in map(int, children)
            if "tierstore.cli.main" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
    except OSError:
        return []


def kill(agent: subprocess.Popen[bytes]) -> None:
    """As a node that loses power: agent and ranks at once."""
    ranks = ranks_under(agent)
    agent.kill()
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    try:
        yield made
    finally:
        made.end()


def losses_in(metrics: Path) -> list[tuple[int, float]]:
    """Steps and their losses, in the order in which they were taken; the last line may be under way."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines)]


def wait_until(what: Callable[[], bool], said: str, agents: Agents) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not what():
        errors = "\n".join(agents.said(number).read_text() for number in range(len(agents.started)))
        assert time.monotonic() < deadline, f"{said}:\n{errors}"
        assert any(agent.poll() is None for agent in agents.started), f"{said}:\n{errors}"
        time.sleep(0.05)


def by_hand(ranks: Ranks, settings: Make, worlds: list[tuple[int, int]]) -> tuple[list[float], int]:
    """Losses and the checksum of ``worlds``, so many ranks each, until so many steps in all; resharded in between."""
    job, losses, crc = settings(), list[float](), 0
    opening = Opening.CREATE
    for size, until in worlds:
        if opening is Opening.RESUME:
            other = settings()
            reshard(job["store"], other["store"], layout_of(ParallelConfig(), size))
            job = other
        found = (
            ranks.run(size, train, job, until, opening) if size > 1 else [train(alone(), job, until, opening)]
        )
        losses += found[0][0]
        crc, opening = found[0][2], Opening.RESUME
    return losses, crc


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_node_joins_loses_its_rank_and_then_itself(
    ranks: Ranks, settings: Make, tmp_path: Path, agents: Agents
) -> None:
    """One rank; two; the second one is killed, and started again; its node is killed, and one rank goes on to the end. The
    losses and records are those of the same numbers of ranks at the same steps, resharded by hand.

    The new node has the first address, and so rank 0: all that torchrun's agents there kept for the job is lost with it.
    """
    job = settings()
    metrics, config = tmp_path / "metrics.jsonl", tmp_path / "steps.toml"
    config.write_text("steps = 100000")
    asked: Settings = {**TINY, "data.paths": str(job["data.paths"][0]), "parallel.elastic": "reshard"}
    asked = {**asked, "commit_every": 2, "eval_every": 0, "eval_batches": 1, "sample_tokens": 0}
    given = [f"--set={name}={value}" for name, value in asked.items()]
    command = (
        "train",
        config,
        f"--store={job['store']}",
        f"--metrics={metrics}",
        "--json",
        "--checksum",
        *given,
    )
    agents.environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def resharded() -> list[tuple[int, int]]:
        """Step and number of ranks, of each reshard."""
        said = "".join(agents.said(number).read_text() for number in range(len(agents.started)))
        found = re.findall(r"resharded for (\d) at step (\d+)", said)
        return sorted((int(step), int(size)) for size, step in found)

    def wait_for_steps(count: int) -> None:
        wanted = len(losses_in(metrics)) + count
        wait_until(lambda: len(losses_in(metrics)) >= wanted, f"{count} more steps", agents)

    stays = agents.start(*command, address="127.0.0.2")
    wait_for_steps(3)
    goes = agents.start(*command, address="127.0.0.1")
    wait_until(lambda: len(resharded()) == 1, "two ranks", agents)
    wait_for_steps(3)
    (lost,) = ranks_under(goes)
    os.kill(lost, signal.SIGKILL)
    wait_until(lambda: lost not in ranks_under(goes) and bool(ranks_under(goes)), "a new rank", agents)
    wait_for_steps(4)
    steps = losses_in(metrics)[-1][0] + 20
    config.write_text(f"steps = {steps}")  # read when ranks start
    kill(goes)
    assert stays.wait(_WAIT_S) == 0, agents.said(0).read_text()

    (joined_at, two), (left_at, one) = resharded()
    assert (two, one) == (2, 1)
    assert 0 < joined_at < left_at < steps
    losses, crc = by_hand(ranks, settings, [(1, joined_at), (2, left_at), (1, steps)])
    # What was computed after the last commit before a kill was computed again.
    assert dict(losses_in(metrics)) == dict(enumerate(losses, 1))
    found = json.loads(agents.printed(0).read_text().splitlines()[-1])
    assert (found["steps"], found["ranks"], found["records_crc32c"]) == (steps, 1, crc)
    assert sorted(path.name for path in tmp_path.glob(f"{job['store'].name}*")) == [job["store"].name]
