"""The training state in a commit, and the conditions under which a resumed run has the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import refuses

from tierstore.errors import StoreFormatError
from tierstore.model.store_schema import STATE_KEY, TrainState
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.store import ParameterStore, RecordSchema, StoreConfig
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.state import conditions, differences
from tierstore.train.vocabulary import choose_vocabulary

Make = Callable[..., TrainConfig]


def test_it_comes_back_as_it_was() -> None:
    state = TrainState(7, 2, 1, 3.25, None, {"threads": 1, "model": {"d_model": 16}})
    assert TrainState.unpack({STATE_KEY: state.pack()}, where="here") == state


@pytest.mark.parametrize("state", [b"", b"{", b"[]", b'{"unknown": 1}'])
def test_a_damaged_state_is_refused(state: bytes) -> None:
    with refuses(StoreFormatError, "here", "damaged"):
        TrainState.unpack({STATE_KEY: state}, where="here")


def test_differences_name_each_condition() -> None:
    was = {"threads": 1, "model": {"d_model": 16, "seed": 0}, "torch": "2"}
    now = {"threads": 2, "model": {"d_model": 16, "seed": 5}, "device": "cpu"}
    assert differences(was, now) == [
        "device: was None, is cpu",
        "model.seed: was 0, is 5",
        "threads: was 1, is 2",
        "torch: was 2, is None",
    ]
    assert differences(was, was) == []


def test_budgets_are_no_conditions(configure: Make) -> None:
    def of(changes: dict[str, Any]) -> dict[str, object]:
        cpu, config = torch.device("cpu"), configure(changes)
        return conditions(
            config,
            threads=1,
            device=cpu,
            data_crc32=3,
            mesh=Mesh.alone(RankEnvironment(), cpu),
            vocabulary=choose_vocabulary(config, ranks=1),
        )

    plain = of({})
    assert of({"host_budget": "1MiB", "cache.policy": "lru", "prefetch.depth": 3, "steps": 9}) == plain
    for name, value in (
        ("schedule.lr", 0.5),
        ("clip_norm", 1.0),
        ("data.micro_batches", 2),
        ("model.seed", 1),
    ):
        (line,) = differences(plain, of({name: value}))
        assert line.startswith(f"{name}: ")


def test_a_resume_under_other_conditions_warns(configure: Make) -> None:
    config = configure()
    with open_session(config, Opening.CREATE) as trainer:
        trainer.step()
        trainer.commit()
    changed = configure({"store": config.store, "schedule.lr": 1e-4})
    with (
        pytest.warns(UserWarning, match=r"not be bit-identical.*schedule.lr: was 0.005, is 0.0001"),
        open_session(changed, Opening.RESUME) as trainer,
    ):
        trainer.step()


def test_a_store_without_training_state_is_not_resumed(configure: Make) -> None:
    config = configure()
    with ParameterStore.create(
        config.store, [RecordSchema("a", 64)], StoreConfig(host_budget=1 << 20)
    ) as store:
        store.register("x", "a")
        store.commit()
    with refuses(StoreFormatError, config.store), open_session(config, Opening.RESUME):
        pass
