"""Stages that are killed: the others end with the cause, and a resume ends in the undisturbed bits."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launcher import Ranks
from stage_cases import dying
from test_rank_kills import end_of

from tierstore.parallel import ParallelConfig

Make = Callable[..., dict[str, Any]]
QUICK = {"timeout_s": 30.0, "grace_s": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(3))
def test_the_death_of_a_stage_ends_all_with_its_cause(
    ranks: Ranks, settings: Make, tmp_path: Path, victim: int
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
