"""Steps that must not be taken, and steps that are cut short."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_cases import step_and_commit
from refusals import refuses

from tierstore.errors import StorePoisonedError
from tierstore.lab.requests import load_requests
from tierstore.trace.files import load_trace
from tierstore.trace.format import TraceKind
from tierstore.trace.replay import replay, replay_steps
from tierstore.train.config import TrainConfig
from tierstore.train.files import DataFormat
from tierstore.train.ranks import Opening
from tierstore.train.session import open_session
from tierstore.train.stepping import NonFiniteError
from tierstore.train.trainer import Trainer

Make = Callable[..., TrainConfig]
TIGHT = {"host_budget": "160KiB"}


def spoil(trainer: Trainer, value: float) -> torch.Tensor:
    """Makes the final norm's weight ``value``; returns what it was."""
    weight = trainer.model.norm.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(value)
    return before


def mend(trainer: Trainer, weight: torch.Tensor) -> None:
    with torch.no_grad():
        trainer.model.norm.weight.copy_(weight)


def explode(trainer: Trainer) -> Any:
    """From now on gradients overflow although the loss is finite."""
    return trainer.model.embedding.register_hook(lambda gradient: gradient * math.inf)


def test_a_skipped_step_is_a_step_of_its_trace(configure: Make, tmp_path: Path) -> None:
    """Cut by the numbers of its accesses or by the ends of steps, a trace has the same steps."""
    config = configure(TIGHT | {"prefetch.depth": 1})
    with open_session(config, Opening.CREATE, trace=tmp_path / "trace") as trainer:
        for _ in range(2):
            trainer.step()
        weight = spoil(trainer, math.nan)
        assert trainer.step().skipped
        mend(trainer, weight)
        for _ in range(2):
            trainer.step()
        live = trainer.store.cache.residency.stats()
    trace = load_trace(tmp_path / "trace")
    accesses = trace.kinds == TraceKind.ACCESS
    ended = np.cumsum(trace.kinds == TraceKind.END_STEP)
    assert (trace.steps[accesses] == ended[accesses]).all()
    by_end = replay_steps(tmp_path / "trace", trace.header)
    assert len(by_end) == load_requests(tmp_path / "trace").step_count == 5
    assert replay(tmp_path / "trace") == live


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.5}, {"clip_norm": 0.5, "data.micro_batches": 2}])
def test_a_loss_that_is_not_finite_skips_the_step(configure: Make, changes: dict[str, Any]) -> None:
    """The step is counted, nothing moves, and the next one goes on from the same state."""
    config = configure(TIGHT | changes)
    with open_session(config, Opening.CREATE) as trainer:
        for _ in range(3):
            trainer.step()
        trainer.commit()
        before = trainer.store.records_crc32c()
        weight = spoil(trainer, math.nan)
        result = trainer.step()
        mend(trainer, weight)
        assert result.skipped
        assert (trainer.state.position, trainer.state.skipped, trainer.state.skipped_in_a_row) == (4, 1, 1)
        assert math.isfinite(trainer.state.train_loss or math.nan)
        assert trainer.store.history.applied == 3
        trainer.commit()
        assert trainer.store.records_crc32c() == before
        assert math.isfinite(trainer.step().loss)
        assert (trainer.state.skipped, trainer.state.skipped_in_a_row) == (1, 0)
        trainer.commit()
        after = trainer.store.records_crc32c()
        loss = trainer.step().loss
    with open_session(config, Opening.RESUME) as trainer:
        assert trainer.state.skipped == 1
        assert trainer.store.records_crc32c() == after
        assert trainer.step().loss == loss


def test_in_a_later_micro_batch(configure: Make) -> None:
    """Gradients of the micro-batches before it are forgotten."""
    losses = []
    for spoils in (False, True):
        config = configure(TIGHT | {"data.micro_batches": 2})
        with open_session(config, Opening.CREATE) as trainer:
            trainer.step()
            if spoils:
                weight = trainer.model.norm.weight.detach().clone()
                batch = trainer.data.batch

                def second_is_spoilt(step: int, micro: int, data: Any = batch, to: Trainer = trainer) -> Any:
                    if micro == 1:
                        spoil(to, math.inf)
                    return data(step, micro)

                trainer.data.batch = second_is_spoilt  # type: ignore[method-assign]
                assert trainer.step().skipped
                trainer.data.batch = batch  # type: ignore[method-assign]
                mend(trainer, weight)
            else:
                trainer.state.position += 1  # as though the step had been skipped
            losses.append([trainer.step().loss for _ in range(4)])
    assert losses[0] == losses[1]


def test_with_clipping_a_gradient_that_is_not_finite_skips_the_step(configure: Make) -> None:
    with open_session(configure(TIGHT | {"clip_norm": 0.5}), Opening.CREATE) as trainer:
        trainer.step()
        trainer.commit()
        before = trainer.store.records_crc32c()
        hook = explode(trainer)
        assert trainer.step().skipped
        hook.remove()
        trainer.commit()
        assert trainer.store.records_crc32c() == before
        assert not trainer.step().skipped


def test_without_clipping_it_stops_the_run_at_the_last_commit(configure: Make) -> None:
    config = configure(TIGHT)
    before, expected = step_and_commit(config)
    with open_session(config, Opening.RESUME) as trainer:
        explode(trainer)
        with refuses(NonFiniteError, "step 1", "gradient"):
            trainer.step()
        with refuses(StorePoisonedError, "step 1"):
            trainer.commit()
        with refuses(StorePoisonedError, "step 1"):
            trainer.step()
    with open_session(config, Opening.RESUME) as trainer:
        assert trainer.store.records_crc32c() == before
        assert [trainer.step().loss for _ in range(2)] == expected


def test_too_many_in_a_row_stop_the_run(configure: Make) -> None:
    config = configure(TIGHT | {"max_skipped": 3, "clip_norm": 1.0})
    with open_session(config, Opening.CREATE) as trainer:
        weight = spoil(trainer, math.nan)
        assert trainer.step().skipped
        assert trainer.step().skipped
        mend(trainer, weight)
        assert not trainer.step().skipped
        spoil(trainer, math.nan)
        assert trainer.step().skipped
        assert trainer.step().skipped
        with refuses(NonFiniteError, "3 steps", "max_skipped"):
            trainer.step()


class Fault(Exception):
    pass


class Faulty:
    """An expert source whose user raises at the fourth lease of one kind."""

    def __init__(self, source: Any, kind: str) -> None:
        self._source, self._kind, self._leases = source, kind, 0

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[Any]:
        return self._give("forward", layer, experts)

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[Any]:
        return self._give("backward", layer, experts)

    def _give(self, kind: str, layer: int, experts: Sequence[int]) -> Iterator[Any]:
        for lease in getattr(self._source, kind)(layer, experts):
            self._leases += kind == self._kind
            if self._leases > 3:
                raise Fault
            yield lease


@pytest.mark.parametrize("when", ["forward", "backward", "validation"])
def test_a_computation_that_raises_wedges_nothing(configure: Make, when: str) -> None:
    """In the middle of an access: the error surfaces, only the last commit counts, and everything closes."""
    config = configure(TIGHT)
    before, expected = step_and_commit(config)
    with open_session(config, Opening.RESUME) as trainer:
        source = trainer.model.get_submodule("blocks.1.mixture").source
        source.target = Faulty(source.target, "forward" if when == "validation" else when)
        with pytest.raises(Fault):
            trainer.evaluate() if when == "validation" else trainer.step()
        with refuses(StorePoisonedError, "cut short"):
            trainer.commit()
    with open_session(config, Opening.RESUME) as trainer:
        assert trainer.store.records_crc32c() == before
        assert [trainer.step().loss for _ in range(2)] == expected


def _steps(config: TrainConfig, opening: Opening) -> tuple[list[float], list[float], int]:
    """Rates and losses of the steps to the end of ``config``, and the checksum of the records."""
    with open_session(config, opening) as trainer:
        results = [trainer.step() for _ in range(config.steps - trainer.state.position)]
        trainer.commit()
        return [one.lr for one in results], [one.loss for one in results], trainer.store.records_crc32c()


def _rates(total: int, count: int) -> list[float]:
    """By hand: 4 steps of warm-up to 5e-3, then half a cosine to a tenth of it at step ``total``."""
    falling = [0.55 + 0.45 * math.cos(math.pi * min(1, (step - 4) / (total - 4))) for step in range(4, count)]
    return [5e-3 * part for part in [0.25, 0.5, 0.75, 1.0, *falling]]


def test_the_rate_falls_over_the_steps_with_which_a_run_began(configure: Make) -> None:
    """Also when a resumed run has more: its store knows them."""
    config = configure({"schedule.total_steps": None})
    assert config.schedule.total_steps is None
    begun, _, _ = _steps(config, Opening.CREATE)
    assert begun == pytest.approx(_rates(12, 12))
    longer, _, _ = _steps(replace(config, steps=16), Opening.RESUME)
    assert begun + longer == pytest.approx(_rates(12, 16))
    assert longer == [pytest.approx(5e-4)] * 4


def test_a_store_of_before_keeps_its_schedule(configure: Make) -> None:
    """It says 60, as every one did that was given no other."""
    config = configure({"schedule.total_steps": 60})
    begun, _, _ = _steps(config, Opening.CREATE)
    schedule = replace(config.schedule, total_steps=None)
    longer, _, _ = _steps(replace(config, steps=64, schedule=schedule), Opening.RESUME)
    assert begun + longer == pytest.approx(_rates(60, 64))


def test_a_run_that_is_extended_has_the_bits_of_one_run(configure: Make) -> None:
    _, losses, crc = _steps(configure({"schedule.total_steps": None}), Opening.CREATE)
    config = configure({"schedule.total_steps": 12, "steps": 5})
    _, before, _ = _steps(config, Opening.CREATE)
    schedule = replace(config.schedule, total_steps=None)
    _, after, again = _steps(replace(config, steps=12, schedule=schedule), Opening.RESUME)
    assert (before + after, again) == (losses, crc)


def test_bytes_that_are_said_to_be_bytes_are_the_same_data(configure: Make) -> None:
    """A run that must say so from now on goes on as before: no warning that its bits are others."""
    config = configure()
    _steps(config, Opening.CREATE)
    _steps(replace(config, steps=13, data=replace(config.data, format=DataFormat.BYTES)), Opening.RESUME)


def test_validation_changes_nothing(configure: Make) -> None:
    """Replays are only caught up earlier; gradients that wait for their step are stepped earlier."""
    for changes in ({}, {"clip_norm": 0.5}):
        bits = []
        for every in (0, 2):
            with open_session(configure(TIGHT | changes), Opening.CREATE) as trainer:
                losses = []
                for step in range(8):
                    losses.append(trainer.step().loss)
                    if every and step % every == 0:
                        assert trainer.evaluate() == trainer.evaluate()
                        trainer.sample("t", 3)
                trainer.commit()
                bits.append((losses, trainer.store.records_crc32c()))
        assert bits[0] == bits[1]
