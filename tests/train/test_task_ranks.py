"""Training on tasks, one process and several ranks: the same numbers, kills, resumes, and tasks that come and go."""

import warnings
from typing import Any

import numpy as np
import pytest
from launcher import Ranks
from rank_cases import TINY, Make, Settings, alone, train
from refusals import refuses

from tierstore.config import load
from tierstore.errors import ConfigError, DataError
from tierstore.model.store_schema import TaskProgress
from tierstore.parallel import Mesh
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.session import open_parts, open_session
from tierstore.train.setup import Loop


@pytest.mark.parametrize(
    ("size", "expert"), [(2, 0), *(pytest.param(4, e, marks=pytest.mark.slow) for e in (0, 2))]
)
def test_ranks_compute_what_one_process_does(ranks: Ranks, tasks: Make, size: int, expert: int) -> None:
    """Uneven pieces, weights and a head of its own; with clipping every gradient is in the norm."""
    changes = {"clip_norm": 0.5, "data.micro_batches": 2}
    losses, norms, _ = train(alone(), tasks(changes), 8, Opening.CREATE)
    found = ranks.run(size, train, tasks(changes), 8, Opening.CREATE, expert=expert)
    assert all(rank[:2] == found[0][:2] for rank in found), "losses and norms are the same bits on all ranks"
    np.testing.assert_allclose(found[0][0], losses, rtol=2e-5)
    np.testing.assert_allclose(found[0][1], norms, rtol=2e-3)


@pytest.mark.parametrize("rows", [(5, 3, 1), pytest.param((1, 1, 1), marks=pytest.mark.slow)])
def test_layer_order_has_the_bits_of_micro_order(ranks: Ranks, tasks: Make, rows: tuple[int, ...]) -> None:
    """Of pieces of other sizes, and on four ranks of three rows where one of them has none."""
    counts = {f"tasks.{name}.rows": count for name, count in zip("abc", rows, strict=True)}
    changes = {**counts, "data.batch_size": sum(rows), "data.micro_batches": 2, "host_budget": 60_000}
    size = 2 if sum(rows) > 4 else 4
    expected = ranks.run(size, train, tasks(changes), 3, Opening.CREATE)
    layered = tasks({**changes, "data.micro_order": "layer"})
    assert ranks.run(size, train, layered, 3, Opening.CREATE) == expected
    losses, norms, _ = train(alone(), tasks(changes), 3, Opening.CREATE)
    np.testing.assert_allclose(expected[0][0], losses, rtol=2e-5)
    np.testing.assert_allclose(expected[0][1], norms, rtol=2e-3)


def validated(mesh: Mesh, settings: Settings) -> tuple[float, dict[str, TaskProgress], dict[str, float]]:
    """Of all tasks and by task, after one step."""
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.CREATE, mesh=mesh) as trainer:
        losses = dict(trainer.step().task_losses)
        trainer.evaluate()
        assert trainer.state.val_loss is not None
        return trainer.state.val_loss, dict(trainer.state.tasks), losses


def test_losses_and_validation_by_task(ranks: Ranks, tasks: Make) -> None:
    total, known, losses = validated(alone(), tasks())
    # Weights 1, 2 and 1 of 4.
    by_task = {name: one.val_loss for name, one in known.items()}
    assert total == pytest.approx((by_task["a"] + 2 * by_task["b"] + by_task["c"]) / 4)
    assert {name: (one.position, one.tokens) for name, one in known.items()} == {
        "a": (5, 40),
        "b": (3, 24),
        "c": (1, 8),
    }
    assert {name: one.train_loss for name, one in known.items()} == losses
    for found, of_rank, step in ranks.run(2, validated, tasks()):
        assert found == pytest.approx(total, rel=1e-5)
        assert {name: one.val_loss for name, one in of_rank.items()} == pytest.approx(by_task, rel=1e-5)
        assert step == pytest.approx(losses, rel=1e-5)


# Tasks that come and go -------------------------------------------------------------------------------------
def one_more_step(settings: Settings) -> tuple[dict[str, int], int]:
    """The positions of all tasks after one more step from the last commit, and which step c's head stands at."""
    with open_session(load(TrainConfig, None, {**TINY, **settings}), Opening.RESUME) as trainer:
        trainer.step()
        trainer.commit()
        positions = {name: known.position for name, known in trainer.state.tasks.items()}
        return positions, trainer.store.records.info("dense.head.c").step


def test_a_task_is_removed_added_and_reweighted_at_a_resume(tasks: Make) -> None:
    first = tasks()
    train(alone(), first, 3, Opening.CREATE)
    second = {key: value for key, value in first.items() if not key.startswith("tasks.c")}
    second |= {"tasks.d.paths": first["tasks.c.paths"], "tasks.d.rows": 1, "tasks.d.head": "own"}
    second["tasks.b.weight"] = 3.0
    with pytest.warns(UserWarning, match="task d: added, from its beginning") as said:
        positions, head = one_more_step(second)
    assert str(said[0].message).endswith(
        "task d: added, from its beginning; task c: removed, kept at example 3 for when it comes back; "
        "task b: weight was 2.0, is 3.0"
    )
    assert positions == {"a": 20, "b": 12, "c": 3, "d": 1}
    assert head == 3, "nobody touched it"
    with pytest.warns(UserWarning, match="task c: added, from its example 3 on; task d: removed"):
        positions, head = one_more_step(first)
    assert positions == {"a": 25, "b": 15, "c": 4, "d": 1}
    assert head == 5


def test_a_resume_without_changes_says_nothing_and_has_the_same_bits(tasks: Make) -> None:
    expected = train(alone(), tasks(), 6, Opening.CREATE)
    store = tasks()
    train(alone(), store, 2, Opening.CREATE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, _, crc = train(alone(), store, 6, Opening.RESUME)
    assert losses == expected[0][2:]
    assert crc == expected[2]


def test_from_and_to_a_run_without_tasks(settings: Make, tasks: Make) -> None:
    store = settings({"data.batch_size": 9})
    train(alone(), store, 2, Opening.CREATE)
    with pytest.warns(UserWarning, match="task a: added"):
        train(alone(), {**tasks(), "store": store["store"]}, 4, Opening.RESUME)
    with pytest.warns(UserWarning, match="task a: removed, kept at example 10"):
        train(alone(), store, 5, Opening.RESUME)


# What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dense.optimizer_state": "nvme"}, ("tasks.c.head:", "shared", "dense.optimizer_state = nvme")),
        ({"tasks.d.paths": ("nowhere",)}, ("data.batch_size:", " 9 and")),
        ({"tasks.a.paths": ("nowhere",)}, ("nowhere:",)),
    ],
)
def test_refused_before_the_store_is_touched(
    tasks: Make, changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    asked = tasks(changes)
    with refuses((ConfigError, DataError), *named):
        train(alone(), asked, 1, Opening.CREATE)
    assert not asked["store"].exists()


def test_a_foreign_loop_has_no_tasks(tasks: Make) -> None:
    config = load(TrainConfig, None, {**TINY, **tasks()})
    with refuses(ConfigError, "tasks:", "none"), open_parts(config, Opening.CREATE, loop=Loop.EXTERNAL):
        pass


def other_weights(mesh: Mesh, settings: Settings) -> str:
    weight = 1.0 + mesh.world.rank
    with pytest.raises(ConfigError) as refused:
        train(mesh, {**settings, "tasks.a.weight": weight}, 1, Opening.CREATE)
    return str(refused.value)


def test_ranks_that_were_told_otherwise(ranks: Ranks, tasks: Make) -> None:
    for message in ranks.run(2, other_weights, tasks()):
        assert message.startswith("rank 1 was given another configuration than rank 0:")
        assert message.endswith("tasks.a.weight: was 1.0, is 2.0")
