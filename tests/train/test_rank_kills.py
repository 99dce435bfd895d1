"""Ranks that are killed, at random moments and in the middle of an opening: a resume ends in the undisturbed bits.

``TIERSTORE_TEST_KILLS`` sets how many kills each storm has (6, by default a part).
"""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import share
from launcher import Ranks, World
from rank_cases import TINY, Make, Settings, ahead, attempt, steps_note, train

from tierstore.config import load
from tierstore.model.store_schema import STATE_KEY
from tierstore.parallel import ExchangeMode, Mesh, ParallelConfig
from tierstore.store import OpenAt
from tierstore.store.committing import Committer
from tierstore.store.disk.home import rank_directory
from tierstore.store.index.database import Index, _Changes
from tierstore.store.reading import read_states
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session


def quick(**layout: Any) -> ParallelConfig:
    """Of ranks that are to notice a death soon."""
    return ParallelConfig(**layout, timeout_s=300.0, grace_s=2.0)


def end_of(world: World) -> list[int]:
    """The exit codes of all ranks, once one of them has died. Survivors unwind and leave by themselves, long before
    ``timeout_s``: one that hangs raises TimeoutExpired.
    """
    world.end()
    return [world.exit_code(rank) for rank in range(len(world.pids))]


def check_death(world: World, victim: int, said: Path) -> None:
    """``victim`` was killed, and has ended the others, which name it."""
    codes = end_of(world)
    assert codes[victim] == -signal.SIGKILL
    assert all(code != 0 for code in codes)
    assert f"rank {victim}" in said.read_text()


# At random moments ------------------------------------------------------------------------------------------

LAP = 8
KILLS = int(os.environ.get("TIERSTORE_TEST_KILLS", share(6)))
TIGHT: Settings = {"host_budget": 60_000}
STAGES: Settings = {"parallel.stages": 2, "model.n_layers": 4, "data.micro_batches": 4}
#: What is held where, and how the ranks (two, or ``size``) are laid out.
STORMS: dict[str, tuple[Settings, dict[str, Any]]] = {
    "experts on both ranks": (TIGHT, {}),
    "two chunks": ({**TIGHT, "parallel.pipeline_degree": 2}, {}),
    "replicas, moments on disk, clipped": (
        {"host_budget": 120_000, "dense.optimizer_state": "nvme", "clip_norm": 0.5},
        {"expert": 1},
    ),
    "partitioned tables, clipped": (
        {**TIGHT, "clip_norm": 0.5, "parallel.embedding": "partitioned", "parallel.head": "partitioned"},
        {},
    ),
    "tensor-parallel, clipped": ({**TIGHT, "clip_norm": 0.5}, {"tensor": 2}),
    "stages, clipped": (
        {**TIGHT, **STAGES, "clip_norm": 0.3},
        {"stages": 2},
    ),
    "hierarchical exchange": ({}, {"size": 4, "exchange": ExchangeMode.HIERARCHICAL, "node_ranks": 2}),
    "tasks": ({}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STORMS)
def test_kills_of_random_ranks_change_no_bit(
    ranks: Ranks, settings: Make, tasks: Make, tmp_path: Path, name: str
) -> None:
    """Each is followed by a resume; every lap that is completed ends in the bits of an undisturbed run. (A resume at other
    positions of the tasks' data would have other losses.)
    """
    (mode, layout), make = STORMS[name], tasks if name == "tasks" else settings
    layout = dict(layout)
    size = layout.pop("size", 2)
    ranks.run(size, _join, **layout)  # starting a world is not part of a run
    started = time.monotonic()
    expected = ranks.run(size, train, make(mode), LAP, Opening.CREATE, **layout)
    # Of an attempt, so long that most die between a commit and the next.
    longest = max(0.5, 0.5 * (time.monotonic() - started))
    random_ = random.Random(11)
    kills, resumed, laps = 0, 0, 0
    store = make(mode)
    while kills < KILLS or laps == 0:
        with ranks.fresh(size, quick(**layout), tmp_path / "stderr") as world:
            for rank in range(size):
                world.send(rank, _commit_often, store, LAP)
            if kills == KILLS - 1:  # on a slow machine all could come before the first steps are committed
                committed = steps_note(store["store"])
                while not committed.exists() and not any(c.poll(0.01) for c in world.connections):
                    pass
            deadline = time.monotonic() + random_.uniform(0.02, longest)
            done = all(c.poll(max(deadline - time.monotonic(), 0)) for c in world.connections)
            if done or kills >= KILLS:
                found = [world.receive(rank) for rank in range(size)]
                for rank in range(size):
                    assert found[rank][2] == expected[rank][2], f"lap {laps}, after {kills} kills"
                    kept = found[rank][0]
                    assert kept == expected[rank][0][LAP - len(kept) :], f"lap {laps}, after {kills} kills"
                resumed += len(found[0][0]) < LAP
                laps += 1
                store = make(mode)
                continue
            os.kill(world.pids[random_.randrange(size)], signal.SIGKILL)
            assert -signal.SIGKILL in end_of(world)
            kills += 1
    assert resumed >= 1, "every kill came before the first commit"


def _join(mesh: Mesh) -> None:
    mesh.world.barrier()


def _commit_often(mesh: Mesh, settings: Settings, steps: int) -> tuple[list[float], list[float], int]:
    return train(attempt(mesh, settings["store"]), settings, steps, Opening.RESTART, commit_every=2)


# While an opening takes a commit back -----------------------------------------------------------------------


def _die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _roll_back_and_die(index: Index, snapshot: str) -> None:
    ROLL_BACK(index, snapshot)
    _die()


def _prepare_and_die(committer: Committer, *arguments: Any, **options: Any) -> None:
    PREPARE(committer, *arguments, **options)
    _die()


ROLL_BACK, PREPARE = Index.roll_back, Committer.commit
#: Where the rank that was ahead is killed: the class, its method, and what stands there instead.
MOMENTS: dict[str, tuple[type, str, Callable[..., None]]] = {
    "before it": (Index, "roll_back", _die),
    "within its transaction": (_Changes, "finish", _die),
    "after it": (Index, "roll_back", _roll_back_and_die),
    "before the next commit": (Committer, "commit", _die),
    "after the next prepare": (Committer, "commit", _prepare_and_die),
}


def dying(mesh: Mesh, settings: Settings, moment: str, victim: int) -> None:
    """Resumes, steps once and commits; rank ``victim`` does not survive ``moment``."""
    if mesh.world.rank == victim:
        owner, name, instead = MOMENTS[moment]
        assert callable(getattr(owner, name)), "nothing is called so any more, and nobody would die"
        setattr(owner, name, instead)
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.RESUME, mesh=mesh) as trainer:
        trainer.step()
        trainer.commit()


def positions(store: Path) -> list[set[OpenAt]]:
    """The commits that each of two ranks could open."""
    return [set(read_states(rank_directory(store, rank, 2), STATE_KEY)) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "expert", "moments"),
    [
        ({}, 0, [*MOMENTS]),
        # Index and committer are the same; what is taken back differs.
        ({"dense.optimizer_state": "nvme"}, 1, ["within its transaction", "after the next prepare"]),
    ],
    ids=["experts", "replicas"],
)
def test_a_kill_while_an_opening_takes_a_commit_back(
    ranks: Ranks, settings: Make, tmp_path: Path, mode: Settings, expert: int, moments: list[str]
) -> None:
    """Rank 1 was a prepared commit ahead. Whenever it dies on the way back, all resume at the step that all have."""
    expected = ranks.run(2, train, settings(mode), 5, Opening.CREATE, expert=expert)
    for moment in moments:
        behind = settings(mode)
        ranks.run(2, ahead, behind, 1, expert=expert)
        for victim in (1, 0) if moment == "after the next prepare" else (1,):
            with ranks.fresh(2, quick(expert=expert), tmp_path / "stderr") as world:
                for rank in range(2):
                    world.send(rank, dying, behind, moment, victim)
                assert end_of(world)[victim] == -signal.SIGKILL, moment
            both = {OpenAt.LAST, OpenAt.PREVIOUS}
            went_back = {"before it": both, "within its transaction": both, "after it": {OpenAt.LAST}}
            if moment in went_back:
                assert positions(behind["store"]) == [{OpenAt.LAST}, went_back[moment]], moment
        found = ranks.run(2, train, behind, 5, Opening.RESUME, expert=expert)
        for rank in range(2):
            kept = found[rank][0]
            assert kept == expected[rank][0][5 - len(kept) :], moment
            assert found[rank][2] == expected[rank][2], moment
