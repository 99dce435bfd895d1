"""Stages that are killed: the others end with the cause, and a resume ends in the undisturbed bits."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from stage_cases import committing, dying, staged
from test_rank_kills import end_of

from tierstore.parallel import ParallelConfig

MakeSettings = Callable[..., dict[str, Any]]
QUICK = {"timeout_s": 30.0, "grace_s": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
def test_the_death_of_a_stage_ends_all_with_its_cause(
    ranks: Ranks, settings: MakeSettings, tmp_path: Path, victim: int
) -> None:
    """The first, a middle or the last one, in a pass of the second step, while others wait for what it would send."""
    changes = settings({"parallel.stages": 3, "model.n_layers": 3})
    with ranks.fresh(3, ParallelConfig(stages=3, **QUICK), tmp_path / "stderr") as world:
        for rank in range(3):
            world.send(rank, dying, changes, victim, 3)
        codes = end_of(ranks, world)
    assert codes[victim] == -signal.SIGKILL
    assert all(code != 0 for code in codes)
    assert f"rank {victim}" in (tmp_path / "stderr").read_text()


#: Kills at random ranks and moments; a longer storm: TIERSTORE_TEST_KILLS=20.
KILLS = int(os.environ.get("TIERSTORE_TEST_KILLS", "3"))
LAP = 12


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.3}], ids=["stepped at once", "clipped"])
def test_kills_of_random_stages_change_no_bit(
    ranks: Ranks, settings: MakeSettings, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Each is followed by a resume; a lap that is completed ends in the bits of an undisturbed run."""
    mode = {"host_budget": 60_000, "parallel.stages": 2, **changes}
    started = time.monotonic()
    expected = ranks.run(2, staged, settings(mode), LAP, stages=2)
    longest = max(0.5, 0.5 * (time.monotonic() - started))
    random_ = random.Random(7)
    kills = laps = 0
    store = settings(mode)
    while kills < KILLS or laps == 0:
        with ranks.fresh(2, ParallelConfig(stages=2, **QUICK), tmp_path / "stderr") as world:
            for rank in range(2):
                world.send(rank, committing, store, LAP)
            deadline = time.monotonic() + random_.uniform(0.02, longest)
            done = all(c.poll(max(deadline - time.monotonic(), 0)) for c in world.connections)
            if done or kills >= KILLS:
                found = [world.receive(rank) for rank in range(2)]
                for rank in range(2):
                    assert found[rank].weights == expected[rank].weights, f"lap {laps}, after {kills} kills"
                    kept = found[rank].losses
                    assert kept == expected[rank].losses[LAP - len(kept) :], f"after {kills} kills"
                laps += 1
                store = settings(mode)
                continue
            os.kill(world.pids[random_.randrange(2)], signal.SIGKILL)
            assert -signal.SIGKILL in end_of(ranks, world)
            kills += 1
