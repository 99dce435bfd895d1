"""A resume with another number of ranks makes the store over, and at every instant one of the two is whole."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from launcher import Ranks
from rank_cases import Make, Settings, alone, attempt, train
from refusals import refuses

from tierstore.errors import ConfigError, StoreError, StoreExistsError, StoreFormatError
from tierstore.parallel import MemoryJobStore, Mesh
from tierstore.train import elastic
from tierstore.train import ranks as agreement
from tierstore.train.elastic import before_name, held_state
from tierstore.train.ranks import Opening

ELASTIC = {"parallel.elastic": "reshard"}


def names(store: Path) -> list[str]:
    """What lies beside ``store`` of it."""
    return sorted(path.name.removeprefix(store.name) for path in store.parent.glob(f"{store.name}*"))


def restarted(mesh: Mesh, settings: Settings, steps: int) -> tuple[list[float], list[float], int]:
    """As ``torchrun`` starts a job again, first or not."""
    return train(attempt(mesh, settings["store"]), settings, steps, Opening.RESTART)


def test_restarts_with_other_numbers_of_ranks(ranks: Ranks, settings: Make) -> None:
    """2, 1 and 2 ranks without a person: the losses of one process, within the rounding of other sums."""
    expected = train(alone(), settings(), 8, Opening.CREATE)[0]
    job = settings(ELASTIC)
    losses = ranks.run(2, restarted, job, 3)[0][0]
    losses += restarted(alone(), job, 5)[0]
    losses += ranks.run(2, restarted, job, 8, expert=1)[0][0]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert names(job["store"]) == ["", ".notes"]


@pytest.mark.slow
def test_tasks_go_on_where_they_were(ranks: Ranks, tasks: Make) -> None:
    """With a head of its own, on 2, 4 and 3 ranks."""
    expected = train(alone(), tasks(), 6, Opening.CREATE)[0]
    job = tasks(ELASTIC)
    losses: list[float] = []
    for size, until in ((2, 2), (4, 4), (3, 6)):
        losses += ranks.run(size, restarted, job, until)[0][0]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def of_job(mesh: Mesh, job: str, settings: Settings, steps: int) -> list[float] | str:
    """An attempt of ``job``, whose notes of earlier attempts are gone: losses, or why it was refused."""
    mesh = replace(mesh, environment=replace(mesh.environment, job=job), job_store=MemoryJobStore())
    try:
        return train(mesh, settings, steps, Opening.RESTART)[0]
    except StoreError as error:
        return str(error)


def test_a_job_knows_its_store_when_its_notes_are_gone(ranks: Ranks, settings: Make) -> None:
    """They were on rank 0's node, say. Without an id, or with another, a store is somebody else's, and is left as it is."""
    expected = train(alone(), settings(), 6, Opening.CREATE)[0]
    job = settings(ELASTIC)
    losses = ranks.run(2, of_job, "a", job, 2)[0]
    for other in ("", "b"):
        refused = of_job(alone(), other, job, 4)
        assert "the store of 2 ranks, and this run has 1" in refused
        assert "there is a store here already" in ranks.run(2, of_job, other, job, 4)[0]
        assert names(job["store"]) == [""]
    for size, until in ((1, 4), (2, 6)):
        found = of_job(alone(), "a", job, until) if size == 1 else ranks.run(2, of_job, "a", job, until)[0]
        losses += found
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    nameless = settings(ELASTIC)
    train(alone(), nameless, 1, Opening.CREATE)
    assert "there is a store here already" in of_job(alone(), "", nameless, 2)


def test_a_job_without_a_name_is_refused_where_nothing_would_know_it(settings: Make) -> None:
    """Before its first attempt, and not at its second."""
    job, mesh = settings(ELASTIC), alone()
    nameless = replace(
        mesh, environment=replace(mesh.environment, supervised=True), job_store=MemoryJobStore()
    )
    with refuses(ConfigError, "parallel.elastic:", "--rdzv-id"):
        train(nameless, job, 1, Opening.RESTART)
    assert not job["store"].exists()
    train(attempt(nameless, job["store"]), job, 1, Opening.RESTART)  # its agents keep the job's notes


def test_off_refuses(ranks: Ranks, settings: Make) -> None:
    job = settings()
    ranks.run(2, train, job, 1, Opening.CREATE)
    with refuses(StoreFormatError, "2 ranks", "tierstore reshard"):
        train(alone(), job, 2, Opening.RESUME)


def test_the_old_store_is_kept_until_the_first_commit(
    ranks: Ranks, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = settings(ELASTIC)
    store = job["store"]
    ranks.run(2, train, job, 2, Opening.CREATE)
    dropped = elastic.drop_before
    found: list[list[str]] = []

    def drop(of: Path) -> None:
        found.append(names(of))
        dropped(of)

    monkeypatch.setattr("tierstore.train.stepping.drop_before", drop)
    train(alone(), job, 3, Opening.RESUME)
    assert found == [["", ".before"]]
    assert names(store) == [""]


def slowly(mesh: Mesh, settings: Settings) -> tuple[list[float], int]:
    """Losses, and how often the ranks met while the store was resharded: before the first record and after each."""
    with (
        mock.patch.object(agreement, "_MEET_S", 0.0),
        mock.patch.object(agreement, "_meet", wraps=agreement._meet) as meet,
    ):
        losses = train(mesh, settings, 2, Opening.RESUME)[0]
    return losses, meet.call_count


def test_ranks_meet_while_the_store_is_resharded(ranks: Ranks, settings: Make) -> None:
    """So none of them gives up, however long it takes: 2 layers of 6 experts, and 4 dense units on each of 2 ranks."""
    job = settings(ELASTIC)
    train(alone(), job, 1, Opening.CREATE)
    (losses, met), (others, met_too) = ranks.run(2, slowly, job)
    assert losses == others
    assert met == met_too == 1 + 12 + 2 * 4 + 1


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("moment", ["made", "first rename", "second rename", "opened"])
def test_a_kill_at_any_moment_is_followed_by_a_restart(
    ranks: Ranks, settings: Make, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Made over but not exchanged, between the two names, exchanged but not opened, and before the first commit."""
    job = settings(ELASTIC)
    store = job["store"]
    ranks.run(2, train, job, 2, Opening.CREATE)
    expected_store = store.with_name("copy")
    shutil.copytree(store, expected_store)
    expected = train(alone(), {**job, "store": expected_store}, 4, Opening.RESUME)
    done: list[str] = []

    def rename(source: Path, target: Path) -> None:
        if moment == "made":
            raise Killed
        os.rename(source, target)
        done.append(target.name)
        if (moment, len(done)) in (("first rename", 1), ("second rename", 2)):
            raise Killed

    def drop(of: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(elastic, "_rename", rename)
        if moment == "opened":
            patch.setattr("tierstore.train.setup.agree", drop)
        with pytest.raises((Killed, TypeError)):
            train(alone(), job, 4, Opening.RESUME)
    left = {
        "made": ["", ".resharded"],
        "first rename": [".before", ".resharded"],
        "second rename": ["", ".before"],
        "opened": ["", ".before"],
    }
    assert names(store) == left[moment]
    assert train(alone(), job, 4, Opening.RESUME) == expected
    assert names(store) == [""]


def test_back_to_as_many_ranks_before_the_first_commit(
    ranks: Ranks, settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new store was never committed, and goes over into one for the old number again."""
    job = settings(ELASTIC)
    expected = ranks.run(2, train, settings(), 4, Opening.CREATE)[0][0]
    losses = ranks.run(2, train, job, 2, Opening.CREATE)[0][0]
    with monkeypatch.context() as patch:
        patch.setattr("tierstore.train.setup.agree", _killed)
        with pytest.raises(Killed):
            train(alone(), job, 4, Opening.RESUME)
    assert names(job["store"]) == ["", ".before"]
    losses += ranks.run(2, train, job, 4, Opening.RESUME)[0][0]
    assert losses == expected, "nothing was computed in between"
    assert names(job["store"]) == [""]


def _killed(*_: object) -> None:
    raise Killed


def test_what_is_in_the_way_is_not_removed(ranks: Ranks, settings: Make) -> None:
    job = settings(ELASTIC)
    ranks.run(2, train, job, 1, Opening.CREATE)
    mine = before_name(job["store"])
    mine.mkdir()
    (mine / "notes").write_text("mine")
    with refuses(StoreExistsError, "parallel.elastic"):
        train(alone(), job, 2, Opening.RESUME)
    assert (mine / "notes").read_text() == "mine"
    state = held_state(job["store"])
    assert state.ranks == 2


def refused(mesh: Mesh, settings: Settings) -> str:
    with pytest.raises(ConfigError) as error:
        train(mesh, settings, 2, Opening.RESUME)
    return str(error.value)


def test_stripes_are_refused_on_all_ranks(ranks: Ranks, settings: Make, tmp_path: Path) -> None:
    job = settings({**ELASTIC, "stripe.directories": (tmp_path / "more",)})
    for message in ranks.run(2, refused, job):
        assert message.startswith("parallel.elastic: expected off with stripe.directories")


def test_no_store_is_held_by_nobody(tmp_path: Path) -> None:
    assert held_state(tmp_path / "nothing") is None
