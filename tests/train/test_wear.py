"""Training under a write budget: the same bits and decisions, its waits in the table; the life of a drive."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tierstore.machine import MemoryAccount
from tierstore.stats import Cause
from tierstore.store.disk import write_budget
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.report import Instant, RunSummary, tier_rows, totals
from tierstore.train.session import open_session
from tierstore.train.trainer import Trainer

Make = Callable[[Mapping[str, Any]], TrainConfig]


@pytest.mark.slow
def test_a_budget_changes_times_and_nothing_else(
    configure: Make, least: Callable[[TrainConfig], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_budget, "_BURST_S", 0.01)
    found = []
    base = {"steps": 4, "commit_every": 2}
    minimum = least(configure(base))
    for budget in ({}, {"wear.daily_write_budget": 5_000_000 * 86_400}):
        config = configure(base | {"host_budget": 2 * minimum} | budget)
        with open_session(config, Opening.CREATE) as trainer:
            losses = [trainer.step().loss for _ in range(config.steps)]
            trainer.commit()
            stalls = trainer.ledger.totals(lambda key: key.cause)
            stats = trainer.store.cache.residency.stats()
            found.append((losses, trainer.store.records_crc32c(), stats))
            assert (Cause.WRITE_BUDGET in stalls) == bool(budget)
            if budget:
                assert stalls[Cause.WRITE_BUDGET] > 0
                assert any(line.startswith("write budget") for line in trainer.store.describe())
    assert found[0] == found[1]
    assert found[0][2].evictions > 0


def summary(trainer: Trainer, config: TrainConfig, begun: Instant) -> RunSummary:
    return RunSummary(
        config=config,
        steps=1,
        train_loss=None,
        val_loss=None,
        tokens=0,
        account=MemoryAccount({"experts": 0}),
        totals=totals(trainer, begun),
    )


def test_the_life_of_a_drive_is_in_the_table(configure: Make) -> None:
    with open_session(configure({"wear.endurance": "1TB"}), Opening.CREATE) as trainer:
        begun = Instant.now(trainer)
        trainer.step()
        trainer.commit()
        written = trainer.store.engine.stats()["written_bytes"] - begun.drive_written_bytes
        said = summary(trainer, trainer.config, begun)
        silent = summary(trainer, configure({}), begun)
    assert said.totals.drive_written_bytes == written
    days = 1e12 / (written / said.totals.seconds) / 86_400
    assert said.drive_life_days == pytest.approx(days)
    assert said.as_json()["drive_life_s"] == pytest.approx(days * 86_400)
    assert tier_rows(said)[-1][1].startswith(f"{days:.3g} days at ")
    assert silent.as_json()["drive_life_s"] is None
    assert not any("endurance" in name for name, _ in tier_rows(silent))
