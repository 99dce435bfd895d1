"""What ranks run in tests of training: module-level functions that ``Ranks.run`` calls on each of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from launcher import Ranks
from tiny_runs import MODEL, RUN, SCHEDULE

from tierstore.config import load
from tierstore.decision import Decision
from tierstore.model.store_schema import STATE_KEY
from tierstore.parallel import Mesh, ParallelConfig, RankEnvironment
from tierstore.parallel.layout import Layout, layout_of
from tierstore.plan.order import agreed_order, choose_order
from tierstore.store import ParameterStore
from tierstore.store.committing import Keep
from tierstore.train import ranks as agreement
from tierstore.train import trainer as trainers
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

Settings = Mapping[str, Any]
#: Makes settings with changes, each with a store of its own.
Make = Callable[..., dict[str, Any]]

TINY: Settings = {
    **RUN,
    **MODEL,
    **SCHEDULE,
    "host_budget": 4 << 20,
    "model.experts": 6,
    "data.batch_size": 4,
}


class FileJobStore:
    """What ``torchrun`` would remember of a job whose attempts are worlds of their own here."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def set(self, key: str) -> None:
        self._directory.mkdir(exist_ok=True)
        (self._directory / key).touch()

    def has(self, key: str) -> bool:
        return (self._directory / key).exists()


def attempt(mesh: Mesh, store: Path) -> Mesh:
    """``mesh`` as one attempt of the job that trains into ``store``."""
    return replace(mesh, job_store=FileJobStore(store.with_name(f"{store.name}.notes")))


def steps_note(store: Path) -> Path:
    """Is there once ``train`` has committed steps in ``store``."""
    return store.with_name(f"{store.name}.steps")


def train(
    mesh: Mesh, settings: Settings, steps: int, opening: Opening, *, commit_every: int = 0
) -> tuple[list[float], list[float], int]:
    """Losses, gradient norms and the checksum of this rank's records after ``steps`` steps in all."""
    config = load(TrainConfig, None, {**TINY, **settings})
    losses, norms = [], []
    with open_session(config, opening, mesh=mesh) as trainer:
        while trainer.state.position < steps:
            result = trainer.step()
            losses.append(result.loss)
            norms.append(result.grad_norm)
            if commit_every and trainer.state.position % commit_every == 0:
                trainer.commit()
                mesh.world.barrier()  # an opening takes back a commit that only some ranks made
                steps_note(config.store).touch()
        trainer.commit()
        return losses, norms, trainer.store.records_crc32c()


def checksums(mesh: Mesh, settings: Settings, stops: int | None = None) -> tuple[int, int | None]:
    """The checksum of this rank's records, and that of all ranks', which meet after every record and go on as long as
    any is at it. Rank ``stops`` is asked to stop after its third record.
    """
    done = 0

    def progress(nbytes: int, total: int) -> None:
        nonlocal done
        done += nbytes > 0  # the first call comes before the first record
        time.sleep(0.01 * mesh.world.rank)  # the later ranks take longer

    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        trainer.commit()
        own = trainer.store.records_crc32c()
        with mock.patch.object(agreement, "_MEET_S", 0.0):
            every = trainers.records_checksum(
                trainer, progress=progress, stopped=lambda: mesh.world.rank == stops and done >= 3
            )
        return own, every


def orders(
    mesh: Mesh, settings: Settings, by_rank: Sequence[Settings]
) -> tuple[Decision[MicroOrder], Decision[MicroOrder]]:
    """The order of micro-batches that this rank would choose, and that of the run."""
    config = load(TrainConfig, None, {**TINY, **settings, **by_rank[mesh.world.rank]})
    return choose_order(config, ranks=mesh.world.size), agreed_order(config, mesh)


def weights(mesh: Mesh, settings: Settings) -> dict[str, npt.NDArray[np.float32]]:
    """The expert weights of this rank at its last commit."""
    found = {}
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.RESUME, mesh=mesh) as trainer:
        for key in trainer.store.records.keys:
            if key.startswith("expert"):
                with ParameterStore(trainer.store).fetch([key]) as lease:
                    found[key] = lease[key].copy("weight")
    return found


def laid_out(ranks: int, expert: int = 0, *, tensor: int = 1, stages: int = 1) -> Layout:
    """``ranks`` ranks in expert groups of ``expert`` (0: all of a stage)."""
    return layout_of(ParallelConfig(expert=expert, tensor=tensor, stages=stages), ranks)


def alone() -> Mesh:
    return Mesh.alone(RankEnvironment(), torch.device("cpu"))


MODES: dict[str, Settings] = {
    "immediate": {},
    "clip": {"clip_norm": 0.5, "data.micro_batches": 2},
    "checkpoint": {"model.checkpoint_activations": "block", "model.shared_expert_d_ff": 16},
}


def ahead(mesh: Mesh, settings: Settings, by: int) -> None:
    """Two acknowledged steps; rank 1 then prepares ``by`` more, as if the others had been killed before."""
    config = load(TrainConfig, None, {**TINY, **settings})
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        trainer.step()
        trainer.step()
        trainer.commit()
        for _ in range(by):
            trainer.step()
        if by and mesh.world.rank == 1:
            trainer.dense.save(trainer.store, trainer.store.history.applied)
            trainer.store.committer.commit({STATE_KEY: trainer.state.pack()}, keep=Keep.PREVIOUS)


def whole_run(mesh: Mesh, settings: Settings, steps: int) -> tuple[list[float], list[float], bytes, int]:
    """Losses, validation losses after every step, a sample, and how many steps were skipped."""
    config = load(TrainConfig, None, {**TINY, **settings})
    losses, validations = [], []
    with open_session(config, Opening.CREATE, mesh=mesh) as trainer:
        for _ in range(steps):
            losses.append(trainer.step().loss)
            validations.append(trainer.evaluate())
        trainer.commit()
        return losses, validations, trainer.sample("store", 5), trainer.state.skipped


def guessed(
    mesh: Mesh, settings: Settings, steps: int
) -> tuple[list[float], list[tuple[int, int, list[int]]]]:
    """Losses, and what routers offered: from which layer, of which, and how often each expert is chosen."""
    offers: list[tuple[int, int, list[int]]] = []
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.CREATE, mesh=mesh) as trainer:
        program = trainer.experts.program  # type: ignore[attr-defined]
        tell = program.offer

        def offer(source: int, layer: int, chosen_E: Any) -> None:
            offers.append((source, layer, chosen_E.tolist()))
            tell(source, layer, chosen_E)

        with mock.patch.object(program, "offer", offer):
            losses = [trainer.step().loss for _ in range(steps)]
    return losses, offers


def check_against_one(
    ranks: Ranks, single: Settings, several: Settings, size: int, sharing: int, **layout: int
) -> None:
    """5 steps of the same global batches on ``size`` ranks, of which ``sharing`` share one copy of the experts: losses,
    norms and experts within fp32 rounding of one process.
    """
    expected, norms, _ = train(alone(), single, 5, Opening.CREATE)
    found = ranks.run(size, train, several, 5, Opening.CREATE, **layout)
    assert all(rank[:2] == found[0][:2] for rank in found), "losses and norms are the same bits on all ranks"
    np.testing.assert_allclose(found[0][0], expected, rtol=2e-5)
    np.testing.assert_allclose(found[0][1], norms, rtol=2e-3)
    want = weights(alone(), single)
    got = ranks.run(size, weights, several, **layout)
    for key, weight in want.items():
        holders = [rank for rank in range(size) if key in got[rank]]
        assert len(holders) == size // sharing
        for rank in holders:
            np.testing.assert_allclose(got[rank][key], weight, atol=2e-4)
            assert np.array_equal(got[rank][key], got[holders[0]][key]), "replicas hold the same bits"


def step_and_commit(config: TrainConfig) -> tuple[int, list[float]]:
    """A run of one step, committed; returns its records' checksum, and the losses of the two steps that would follow."""
    with open_session(config, Opening.CREATE) as trainer:
        trainer.step()
        trainer.commit()
        before = trainer.store.records_crc32c()
        return before, [trainer.step().loss for _ in range(2)]
