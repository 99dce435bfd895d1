"""Every policy live: tiny runs under a tight budget compute the same bits and replay to the same counts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from python_lru import PythonMru
from refusals import refuses

from tierstore._native import Candidates, policy_names
from tierstore.errors import StorePoisonedError
from tierstore.store.parameter_store import ParameterStore
from tierstore.trace.files import load_trace
from tierstore.trace.replay import replay
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session

Make = Callable[..., TrainConfig]
Least = Callable[[TrainConfig], int]

OPTIONS: dict[str, Mapping[str, float | str]] = {
    "slru": {"segments": 2},
    "2q": {"in_fraction": 0.4},
    "lirs": {"hir_fraction": 0.3},
    "s3-fifo": {"small_fraction": 0.3, "move_threshold": 1},
    "w-tinylfu": {"window_fraction": 0.2},
    "next-use": {"half_life": 4},
    "learned-use": {"half_life": 8},
}


class Newest(PythonMru):
    """Refuses to go on after ``lasts`` choices."""

    def __init__(self, lasts: float = 1e9) -> None:
        super().__init__()
        self.left = int(lasts)

    def select(self, frames: int, candidates: Candidates) -> list[int]:
        if self.left == 0:
            raise ZeroDivisionError("no more choices")
        self.left -= 1
        return super().select(frames, candidates)


def tight(configure: Make, least: Least, changes: Mapping[str, Any]) -> TrainConfig:
    config = configure({"steps": 5, "prefetch.depth": 1, **changes})
    return configure({"steps": 5, "prefetch.depth": 1, **changes, "host_budget": 2 * least(config)})


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("policy", [*policy_names(), f"{__name__}:Newest"])
def test_every_policy_computes_the_same_and_replays_exactly(
    policy: str, configure: Make, least: Least, tmp_path: Path, expected: dict[str, Any]
) -> None:
    options = {f"cache.options.{name}": value for name, value in OPTIONS.get(policy, {}).items()}
    config = tight(configure, least, {"cache.policy": policy, **options})
    with open_session(config, Opening.CREATE, trace=tmp_path / "trace") as trainer:
        losses = [trainer.step().loss for _ in range(config.steps)]
        trainer.commit()
        bits = losses, trainer.store.records_crc32c()
        live = trainer.store.cache.residency.stats()
    assert live.evictions
    assert replay(tmp_path / "trace", load_trace(tmp_path / "trace").header) == live
    assert expected.setdefault("bits", bits) == bits


def test_what_a_policy_of_the_users_raises_comes_out_and_the_store_stays_whole(
    configure: Make, least: Least
) -> None:
    config = tight(configure, least, {"cache.policy": f"{__name__}:Newest", "cache.options.lasts": 40})
    with open_session(config, Opening.CREATE) as trainer:
        trainer.commit()
        with refuses(ZeroDivisionError, "no more choices") as raised:
            [trainer.step() for _ in range(config.steps)]
        assert f"in cache policy {__name__}:Newest, select()" in raised.value.__notes__
        with pytest.raises(StorePoisonedError):
            trainer.commit()
    with ParameterStore.open(config.store) as store:
        assert store.verify().failures == []
