"""Units of which nothing is trained: no slices, no records, no messages; the passes are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from dense_cases import (
    ADAMW,
    LR,
    Setting,
    backward,
    freeze,
    make_model,
    piece,
    slice_model,
    train_group,
    whole_weights,
)
from dense_ranks import on_ranks
from launcher import Ranks

from tierstore.cache.access import Phase
from tierstore.config import load
from tierstore.dense import DenseConfig, dense_schemas, unit_layouts
from tierstore.dense.layout import dense_bytes
from tierstore.parallel import RankGroup
from tierstore.prefetch import HorizontalQueue
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.schedule import unit_schedule
from tierstore.store import ParameterStore

ALIASED: dict[str, Any] = {}
#: Of three blocks' units: in all of them, in the middle one.
TRAINED = ["attention", "blocks.1.attention"]
NOTHING = "nothing at all"


def plain(setting: Setting) -> dict[str, torch.Tensor]:
    """The same steps with torch's optimizer, no slices."""
    model = make_model(setting.model)
    freeze(model, setting.trained)
    own = {name: part for name, part in model.named_parameters() if part.requires_grad}
    optimizer = torch.optim.AdamW(
        own.values(), betas=ADAMW.betas, eps=ADAMW.eps, weight_decay=ADAMW.weight_decay, fused=True
    )
    for step in range(setting.steps):
        optimizer.zero_grad()
        for number in range(setting.pieces):
            model.set_step(step, number)
            output = model(*piece(model.config, step, number))
            torch.autograd.backward(output.objective / setting.pieces)
        for group in optimizer.param_groups:
            group["lr"] = LR * (1 + step % 3)
        optimizer.step()
    return {name: part.detach().clone() for name, part in own.items()}


@pytest.mark.parametrize(
    "dense", [ALIASED, {"optimizer_state": "host"}, {"optimizer_state": "host", "buffers": 1}], ids=str
)
@pytest.mark.parametrize("trained", TRAINED)
def test_what_is_trained_follows_torch(trained: str, dense: dict[str, Any]) -> None:
    setting = Setting(trained=trained, dense=dense, pieces=1)
    found, expected = train_group(RankGroup.alone(), setting), plain(setting)
    assert found.weights.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found.weights[name], values), name
    layouts = [*unit_layouts([("embedding", []), ("block", [torch.nn.Parameter(torch.zeros(3))])], ranks=1)]
    assert [layout.empty for layout in layouts] == [True, False]
    assert len(dense_schemas(layouts)) == 1


@pytest.mark.parametrize("trained", TRAINED)
def test_on_two_ranks(ranks: Ranks, trained: str) -> None:
    setting = Setting(trained=trained, pieces=2)
    alone = train_group(RankGroup.alone(), setting)
    for outcome in on_ranks(ranks, 2, setting):
        assert outcome.weights.keys() == alone.weights.keys()
        assert all(torch.equal(outcome.weights[name], values) for name, values in alone.weights.items())
        assert outcome.norms == pytest.approx(alone.norms, rel=1e-12), "sums are cut otherwise"


@pytest.mark.parametrize("trained", TRAINED)
def test_through_the_schedule_and_a_store(tmp_path: Path, trained: str) -> None:
    """The queue drives it, moments are on disk, records are committed and come back."""
    model = make_model({})
    freeze(model, trained)
    config = {"optimizer_state": "nvme"}

    def listen(dense: Any) -> HorizontalQueue:
        schedule = unit_schedule(dense.layouts, DenseConfig(), PrefetchConfig(), moe_layers=(1,))
        return HorizontalQueue(schedule, dense)

    queue: Any = None

    def listening(dense: Any) -> HorizontalQueue:
        nonlocal queue
        queue = listen(dense)
        return queue

    dense = slice_model(model, RankGroup.alone(), config, listening)
    schemas = dense_schemas(dense.layouts)
    assert sum(dense.record_counts().values()) == sum(not layout.empty for layout in dense.layouts)
    with ParameterStore.create(tmp_path / "s", schemas) as store:
        dense.register(store.core)
        for step in range(2):
            queue.begin(training=True)
            backward(model, dense, RankGroup.alone(), Setting(pieces=1), step)
            for unit in queue.optimizer_units:
                with queue.during(unit, Phase.OPTIMIZER):
                    dense.step_unit(unit, LR)
        dense.save(store.core, 2)
        store.commit()
        whole = whole_weights(model, dense)
        queue.reset()
        for unit in dense.slices:
            unit.weight.zero_()
        dense.load(store.core, 2)
        again = whole_weights(model, dense)
    assert all(torch.equal(again[name], values) for name, values in whole.items())


@pytest.mark.parametrize("optimizer_state", ["device", "host", "nvme"])
@pytest.mark.parametrize("trained", [*TRAINED, NOTHING])
def test_memory_is_as_computed(trained: str, optimizer_state: str) -> None:
    model = make_model({})
    freeze(model, trained)
    dense = slice_model(model, RankGroup.alone(), {"optimizer_state": optimizer_state})
    config = load(DenseConfig, None, {"optimizer_state": optimizer_state})
    assert dense_bytes(dense.layouts, config, ranks=1) == dense.nbytes
    if trained == NOTHING:  # but the place through which moments on disk would pass
        assert (dense.nbytes.slices, dense_schemas(dense.layouts), dense.record_counts()) == (0, [], {})
        with torch.no_grad():
            model(*piece(model.config, 0, 0))
