"""Ranks that die: the others learn who and why within seconds, whatever they are doing."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from launcher import Ranks

from tierstore.errors import PeerError
from tierstore.parallel import Mesh, ParallelConfig, RankEnvironment, RankGroup
from tierstore.parallel.watch import EXIT_STATUS, DeathWatch


def _blocked(mesh: Mesh, operation: str) -> tuple[str, int | None, str]:
    """Waits for a collective that not all join."""
    group = mesh.world
    try:
        if operation == "all_to_all":
            rows, splits = torch.ones(group.size, 4), [1] * group.size
            group.all_to_all(torch.empty_like(rows), rows, splits, splits).wait()
        elif operation == "all_gather":
            group.all_gather(torch.empty(group.size * 8), torch.ones(8)).wait()
        elif operation == "reduce_scatter":
            group.reduce_scatter(torch.empty(group.size * 8), torch.ones(8)).wait()
        else:
            group.barrier()
    except PeerError as error:
        return error.operation, error.rank, str(error)
    raise AssertionError("the collective came to an end")


def _kill_myself(mesh: Mesh) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleep(mesh: Mesh, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize(
    ("size", "operation"), [(2, "all_to_all"), (2, "all_gather"), (4, "reduce_scatter"), (4, "all_reduce")]
)
def test_survivors_of_a_kill_get_an_error_that_names_the_rank(
    ranks: Ranks, tmp_path: Path, size: int, operation: str
) -> None:
    config = ParallelConfig(timeout_s=30.0, grace_s=20.0)
    victim = size - 1
    with ranks.fresh(size, config, tmp_path / "stderr") as world:
        for rank in range(victim):
            world.send(rank, _blocked, operation)
        world.send(victim, _kill_myself)
        for rank in range(victim):
            assert world.receive(rank, 15.0) == (
                operation,
                victim,
                f"{operation}: rank {victim} failed: its process ended",
            )
        assert world.exit_code(victim) == -signal.SIGKILL
    said = (tmp_path / "stderr").read_text()
    for rank in range(victim):
        assert f"tierstore: rank {rank}: rank {victim} failed: its process ended" in said


def test_a_rank_that_hangs_fails_the_collective_in_time(ranks: Ranks) -> None:
    with ranks.fresh(2, ParallelConfig(timeout_s=1.0, grace_s=20.0)) as world:
        world.send(1, _sleep, 60.0)
        world.send(0, _blocked, "all_to_all")
        operation, rank, message = world.receive(0, 20.0)
        assert (operation, rank) == ("all_to_all", None)
        assert "Timed out" in message


def test_a_rank_that_does_nothing_is_ended(ranks: Ranks, tmp_path: Path) -> None:
    config = ParallelConfig(timeout_s=30.0, grace_s=0.2)
    with ranks.fresh(2, config, tmp_path / "stderr") as world:
        world.send(1, _sleep, 60.0)
        world.send(0, _kill_myself)
        assert world.exit_code(1) == 1
    said = (tmp_path / "stderr").read_text()
    assert "rank 1: rank 0 failed: its process ended; ending within 0.2 s" in said
    assert "rank 1: still running 0.2 s after the failure; ending now" in said


def _sleep_and_never_abort(mesh: Mesh, seconds: float) -> None:
    torch.distributed.ProcessGroup.abort = lambda self: time.sleep(seconds)  # type: ignore[method-assign]
    time.sleep(seconds)


def test_an_abort_that_does_not_return_delays_no_end(ranks: Ranks, tmp_path: Path) -> None:
    """As NCCL's can, which waits for its device."""
    config = ParallelConfig(timeout_s=30.0, grace_s=0.2)
    with ranks.fresh(2, config, tmp_path / "stderr") as world:
        world.send(1, _sleep_and_never_abort, 600.0)
        time.sleep(0.2)
        world.send(0, _kill_myself)
        assert world.exit_code(1) == 1  # which waits for a minute at most
    assert "rank 1: still running 0.2 s after the failure" in (tmp_path / "stderr").read_text()


def test_a_rank_that_fails_ends_though_its_abort_does_not_return(capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[int] = []
    never = threading.Event()
    watch = DeathWatch(
        RankEnvironment(),
        RankGroup.alone(),
        grace_s=0.05,
        timeout_s=1.0,
        on_failure=never.wait,
        end=ended.append,
    )
    watch.leave(ValueError("of its own"))
    never.set()
    assert ended == [EXIT_STATUS]
    assert "not aborted within 0.05 s" in capfd.readouterr().err


def test_ranks_that_end_in_order_say_nothing(ranks: Ranks, tmp_path: Path) -> None:
    with ranks.fresh(4, stderr=tmp_path / "stderr") as world:
        world.run(_sleep, 0.0)
        world.end()
        assert [world.exit_code(rank) for rank in range(4)] == [0] * 4
    assert (tmp_path / "stderr").read_text() == ""
