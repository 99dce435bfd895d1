"""The horizontal queue over real slices on real ranks: the bits are those of gathering on demand, all ranks gather in
one order, and the order does not depend on how slow a rank is.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from dense_cases import make_model
from launcher import Ranks

from tierstore.cache.access import Phase
from tierstore.dense import DenseConfig, DenseSlices, GatherOnDemand, unit_layouts
from tierstore.parallel import Mesh
from tierstore.prefetch import HorizontalQueue, PrefetchConfig, Schedule, StepTiming, unit_schedule
from tierstore.prefetch.schedule import Window
from tierstore.stats import Cause, StallLedger, Tier
from tierstore.store.adamw import AdamWConfig

Log = list[tuple[str, int]]


class Logged:
    """Slices that write down what is asked of them; ``pause_s`` makes a rank slow."""

    def __init__(self, dense: DenseSlices, pause_s: float) -> None:
        self._dense = dense
        self._pause_s = pause_s
        self.log: Log = []

    def gather(self, unit: int) -> None:
        self.log.append(("gather", unit))
        self._dense.gather(unit)

    def use(self, unit: int) -> None:
        time.sleep(self._pause_s)
        self._dense.use(unit)

    def release(self, unit: int) -> None:
        self.log.append(("release", unit))
        self._dense.release(unit)


def expected_log(schedule: Schedule, steps: int) -> Log:
    window = Window(schedule, training=True)
    log: Log = [("gather", unit) for unit in window.begin().gathers]
    for position in range(steps * len(schedule.passes)):
        movement = window.leave(position)
        log += [("gather", unit) for unit in movement.before]
        log += [("release", unit) for unit in movement.releases]
        log += [("gather", unit) for unit in movement.after]
    return log


def train(mesh: Mesh, depth: int | None, dense_changes: dict[str, Any], changes: dict[str, Any]) -> Any:
    """Three steps of two micro-batches, with a validation between; depth None: gathered on demand."""
    group, timing = mesh.world, StepTiming(changes.get("timing", "deferred"))
    model = make_model({"n_layers": 4, **changes.get("model", {})})
    config = model.config
    settings, units = DenseConfig(**dense_changes), model.dense_units()
    layouts = unit_layouts(units, ranks=group.size, narrow=model.cast_parameters(), fusion=settings.fusion)
    compute = config.compute_dtype.torch
    dense = DenseSlices(
        units,
        layouts,
        group=group,
        device=torch.device("cpu"),
        adamw=AdamWConfig(),
        config=settings,
        compute=compute,
    )
    prefetch = PrefetchConfig(gather_depth=depth or 0)
    schedule = unit_schedule(
        layouts, settings, prefetch, moe_layers=config.moe_layers, compute=compute, micro_batches=2
    )
    schedule = replace(schedule, timing=timing)
    logged, ledger = Logged(dense, 0.001 * group.rank), StallLedger()
    queue = None if depth is None else HorizontalQueue(schedule, logged, ledger)
    dense.attach(model, GatherOnDemand(dense, settings.reshard) if queue is None else queue)
    losses = []
    for step in range(3):
        if queue is not None:
            queue.begin(training=True)
        dense.zero_grad()
        for micro in range(2):
            dense.begin_micro()
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + group.rank)
            tokens = torch.randint(config.vocab_size, (2, config.seq_len + 1), generator=generator)
            model.set_step(step, micro)
            output = model(tokens[:, :-1], tokens[:, 1:])
            torch.autograd.backward(output.objective)
            dense.end_micro()
            losses.append(float(output.objective.detach()))
        for item in schedule.passes:
            if item.phase is Phase.OPTIMIZER:
                if queue is None:
                    dense.step_unit(item.unit, 1e-3)
                else:
                    with queue.during(item.unit, item.phase):
                        dense.step_unit(item.unit, 1e-3)
        if step == 1 and changes.get("validate"):
            with torch.no_grad():
                if queue is not None:
                    queue.begin(training=False)
                model(tokens[:, :-1], tokens[:, 1:])
    if queue is not None:
        queue.reset()
    weights = [value for unit in range(len(layouts)) for value in dense.whole(unit)]
    charged = {(row.key.tier, row.key.cause) for row in ledger.rows()}
    return losses, weights, logged.log, expected_log(schedule, 3), charged


def agree(found: list[Any], expected: list[Any]) -> None:
    for (losses, weights, log, wanted, _), (known_losses, known_weights, *_) in zip(
        found, expected, strict=True
    ):
        assert losses == known_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, known_weights, strict=True))
        assert log[: len(wanted)] == wanted or not wanted


CHECKPOINTED = {"model": {"checkpoint_activations": "block", "compute_dtype": "bf16"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "dense", "changes"),
    [
        (0, {}, {}),
        (1, {"buffers": 1}, {}),
        (3, {}, {}),
        (3, {"buffers": 1}, {}),
        (2, {"reshard": "after-backward"}, {}),
        (2, {}, CHECKPOINTED),
    ],
    ids=str,
)
def test_looking_ahead_changes_no_bit(
    ranks: Ranks, depth: int, dense: dict[str, Any], changes: dict[str, Any]
) -> None:
    expected = ranks.run(2, train, None, dense, changes)
    found = ranks.run(2, train, depth, dense, changes)
    agree(found, expected)
    assert found[0][2] == found[1][2]  # one order on all ranks
    assert all((Tier.RANKS, Cause.GATHER) in rank[4] for rank in found)


def test_validation_between_steps(ranks: Ranks) -> None:
    expected = ranks.run(2, train, None, {}, {"validate": True})
    found = ranks.run(2, train, 2, {}, {"validate": True})
    for (losses, weights, *_), (known_losses, known_weights, *_) in zip(found, expected, strict=True):
        assert losses == known_losses
        assert all(torch.equal(a, b) for a, b in zip(weights, known_weights, strict=True))
    assert found[0][2] == found[1][2]
