"""Tiny runs in this process: a text, a configuration by dotted names, and what a run computed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from task_cases import three_tasks, write_texts
from tiny_runs import MODEL, QUIET, RUN, SCHEDULE

from tierstore._native import ResidencyStats
from tierstore.config import load
from tierstore.errors import BudgetError
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.trainer import StepResult, Trainer

Settings = Mapping[str, Any]
RAM = 8 << 20  # holds every tiny model whole

_TINY = {
    **RUN,
    **QUIET,
    **MODEL,
    **SCHEDULE,
    "host_budget": RAM,
    "steps": 12,
    "model.experts": 12,
    "data.batch_size": 2,
}


MakeConfig = Callable[..., TrainConfig]


@pytest.fixture
def configure(text: Path, tmp_path: Path) -> MakeConfig:
    """Tiny configurations with ``changes`` by dotted names; each has a store of its own unless it says so."""
    made = 0

    def make(changes: Settings | None = None) -> TrainConfig:
        nonlocal made
        made += 1
        merged: dict[str, Any] = {"data.paths": (str(text),), "store": tmp_path / f"store{made}"}
        merged |= _TINY | dict(changes or {})
        return load(TrainConfig, None, merged)

    return make


@dataclass
class Outcome:
    """What a run computed, and what it took. ``stepped[i]``: keys of the experts that step i reached."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    stepped: list[frozenset[str]] = field(default_factory=list)
    crc: int = 0
    stats: ResidencyStats = field(init=False)

    @property
    def bits(self) -> tuple[list[float], int]:
        return self.losses, self.crc

    def add(self, result: StepResult, trainer: Trainer) -> None:
        self.losses.append(result.loss)
        self.norms.append(result.grad_norm)
        if result.skipped:
            self.skipped.append(result.step)
        store = trainer.store
        reached = store.history.applied
        experts = (key for key in store.records.keys if key.startswith("expert"))
        self.stepped.append(frozenset(key for key in experts if store.records.info(key).step == reached))


def run(
    config: TrainConfig, *, stops: tuple[int, ...] = (), watch: Callable[[Trainer], None] | None = None
) -> Outcome:
    """All steps of ``config``, closed and resumed after each step in ``stops``; commits as configured."""
    outcome = Outcome()
    opening = Opening.CREATE
    for stop in (*stops, config.steps):
        with open_session(config, opening) as trainer:
            opening = Opening.RESUME
            while trainer.state.position < stop:
                outcome.add(trainer.step(), trainer)
                if config.commit_every and trainer.state.position % config.commit_every == 0:
                    trainer.commit()
            trainer.commit()
            if watch is not None:
                watch(trainer)
            outcome.stats = trainer.store.cache.residency.stats()
            outcome.crc = trainer.store.records_crc32c()
    return outcome


def least_budget(config: TrainConfig, tmp_path: Path) -> int:
    """The minimum that a refusal names, in bytes."""
    from dataclasses import replace

    with (
        pytest.raises(BudgetError) as refused,
        open_session(replace(config, host_budget=1, store=tmp_path / "refused"), Opening.CREATE),
    ):
        pass
    assert not (tmp_path / "refused").exists()
    found = re.search(r"minimum is (\d+) bytes", str(refused.value))
    return int(found[1])


Runner = Callable[..., Outcome]


@pytest.fixture
def train() -> Runner:
    return run


@pytest.fixture
def least(tmp_path: Path) -> Callable[[TrainConfig], int]:
    return lambda config: least_budget(config, tmp_path)


@pytest.fixture
def settings(text: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Settings with a store of their own."""
    made = 0

    def make(changes: Settings | None = None) -> dict[str, Any]:
        nonlocal made
        made += 1
        return {"data.paths": (str(text),), "store": tmp_path / f"store{made}", **(changes or {})}

    return make


@pytest.fixture
def tasks(
    text: Path, tmp_path: Path, settings: Callable[..., dict[str, Any]]
) -> Callable[..., dict[str, Any]]:
    """Settings of three tasks with ``changes``, and a store of their own."""
    of_tasks = three_tasks(write_texts(tmp_path, text))

    def make(changes: Settings | None = None) -> dict[str, Any]:
        return settings({**of_tasks, **(changes or {})})

    return make
