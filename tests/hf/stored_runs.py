"""Runs over an imported store, in this process and in others: a module that a spawned process can import."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiny_runs import QUIET, RUN, SCHEDULE

from tierstore.config import load
from tierstore.hf.spec import stored_spec
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

RAM = 16 << 20

_TINY: dict[str, Any] = {
    **RUN,
    **QUIET,
    **SCHEDULE,
    "host_budget": RAM,
    "finetune.seq_len": 24,
    "data.format": "bytes",
    "data.batch_size": 2,
    "schedule.lr": 3e-4,
    "schedule.total_steps": 60,
}


def configuration(settings: Mapping[str, Any]) -> TrainConfig:
    config = load(TrainConfig, None, {**_TINY, **settings})
    spec = stored_spec(config.store, config.finetune, config.lora)
    assert spec is not None
    return replace(config, model=spec)


def train(
    config: TrainConfig, *, stops: tuple[int, ...] = (), mesh: Mesh | None = None
) -> tuple[list[float], int, int]:
    """Losses, the checksum of all records, and evictions; closed and resumed after the steps ``stops``."""
    losses: list[float] = []
    for stop in (*stops, config.steps):
        with open_session(config, Opening.RESUME, mesh=mesh) as trainer:
            while trainer.state.position < stop:
                losses.append(trainer.step().loss)
                if config.commit_every and trainer.state.position % config.commit_every == 0:
                    trainer.commit()
            trainer.commit()
            evictions = trainer.store.cache.residency.stats().evictions
            crc = trainer.store.records_crc32c()
    return losses, crc, evictions


def attempt(settings: Mapping[str, Any], ready: Any) -> None:
    config = configuration(settings)
    ready.set()
    train(config)
