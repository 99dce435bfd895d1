"""Training steps of several micro-batches in micro order and in layer order, in turns (docs/BENCH.md).

Each way of taking a step has a process of its own; all are open side by side and step in turns, so that a disk whose speed
drifts treats them alike. The losses of both orders must be equal. The speed-up is held against the ratio of the bytes that
they move, spilled block inputs included: where the disk is all that counts it can be no more. Two further ways show
memory: one micro-batch, and one of M-fold size whose blocks are checkpointed.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures, named, ratios
from tierstore.bench.training.worker import RoundSteps, TrainingProcess
from tierstore.errors import ConfigError
from tierstore.model.config import CheckpointActivations
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder

_OF_BYTES = 0.85  # of the ratio of bytes, the speed-up where the disk is the limit


class Way(Enum):
    """How a step is taken."""

    MICRO = "micro"
    LAYER = "layer"
    #: A step of one micro-batch, of the same size.
    ONE = "one"
    #: The same tokens in one micro-batch, whose blocks are checkpointed.
    LARGER = "larger"

    def of(self, config: TrainConfig) -> TrainConfig:
        """``config`` as this way takes its steps."""
        data = config.data
        if self is Way.ONE:
            return replace(config, data=replace(data, micro_batches=1))
        if self is Way.LARGER:
            model = config.model.vary("checkpoint_activations", CheckpointActivations.BLOCK)
            data = replace(data, micro_batches=1, batch_size=data.batch_size * data.micro_batches)
            return replace(config, data=data, model=model or config.model)
        return replace(config, data=replace(data, micro_order=MicroOrder(self.value)))


@dataclass(frozen=True, kw_only=True)
class OrderBench:
    """How long to measure, and which ways beside micro and layer order."""

    steps: int = 2
    warmup: int = 2
    rounds: int = 3
    also: tuple[Way, ...] = ()

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rounds=self.rounds)
        at_least(0, warmup=self.warmup)

    @property
    def ways(self) -> tuple[Way, ...]:
        return tuple(dict.fromkeys((Way.MICRO, Way.LAYER, *self.also)))


@dataclass(frozen=True, kw_only=True)
class WaySteps(Figures):
    """Steps of one way. ``step_moved_bytes``: a mean of what was read and written. ``planned_resident_bytes``: its budgets
    and what it announced beside them.
    """

    step_samples_s: Sequence[float]
    step_median_s: float
    step_moved_bytes: int
    step_spilled_bytes: int
    step_cpu_s: float
    step_stall_s: float
    peak_resident_bytes: int
    planned_resident_bytes: int
    peak_to_plan_ratio: float


@dataclass(frozen=True, kw_only=True)
class OrderResult(Figures):
    """What ``run`` found. Ratios are micro order's over layer order's; ``of_bytes_ratio`` is the speed-up over the ratio of
    bytes, the median of rounds.
    """

    bench: str = "order"
    steps: int
    rounds: int
    warmup_steps: int
    micro_batches: int = field(metadata=named("micro_batches_count"))
    host_budget_bytes: int
    micro: WaySteps
    layer: WaySteps
    one: WaySteps | None = field(metadata=IF_ANY)
    larger: WaySteps | None = field(metadata=IF_ANY)
    moved_bytes_ratio: float
    round_speed_up_ratio: Sequence[float]
    speed_up_ratio: float
    of_bytes_ratio: float
    same_losses: bool


def run(config: TrainConfig, bench: OrderBench, say: Callable[[str], None] = lambda _: None) -> OrderResult:
    """Measures. ``config.store`` is a directory for stores, made and removed here.

    Raises ConfigError (one micro-batch; ``config.store`` exists), BudgetError, CapabilityError, WorkerError, OSError.
    """
    if config.data.micro_batches < 2:
        raise ConfigError(
            f"data.micro_batches: expected at least 2 to have an order, got {config.data.micro_batches}"
        )
    config = replace(config, steps=bench.warmup + bench.steps * bench.rounds)
    rounds: dict[Way, list[RoundSteps]] = {way: [] for way in bench.ways}
    planned: dict[Way, int] = {}
    with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
        processes: dict[Way, TrainingProcess] = {}
        for way in bench.ways:
            say(f"opening the run in {way.value} order" if way in _ORDERS else f"opening the run {way.value}")
            process = TrainingProcess(way.value, _stored(way.of(config), directory / way.value))
            stack.callback(process.close)
            processes[way] = process
            planned[way] = process.opened.fixed_resident_bytes + config.host_budget
            if bench.warmup:
                process.run(bench.warmup)
        for turn in range(bench.rounds):
            for way, process in processes.items():
                rounds[way].append(process.run(bench.steps))
            medians = ", ".join(
                f"{way.value} {statistics.median(found[-1].step_s):.3f} s" for way, found in rounds.items()
            )
            say(f"round {turn + 1} of {bench.rounds}: {medians}")
    return _result(config, bench, rounds, planned)


_ORDERS = (Way.MICRO, Way.LAYER)


def _stored(config: TrainConfig, store: Path) -> TrainConfig:
    return replace(config, store=store)


def _result(
    config: TrainConfig,
    bench: OrderBench,
    rounds: Mapping[Way, Sequence[RoundSteps]],
    planned: Mapping[Way, int],
) -> OrderResult:
    found = {way: _steps(taken, planned[way]) for way, taken in rounds.items()}
    micro, layer = found[Way.MICRO], found[Way.LAYER]
    times = {way: [statistics.median(one.step_s) for one in rounds[way]] for way in _ORDERS}
    speed_ups = ratios(times[Way.MICRO], times[Way.LAYER])
    moved = micro.step_moved_bytes / max(layer.step_moved_bytes, 1)
    speed_up = statistics.median(speed_ups)
    return OrderResult(
        steps=bench.steps,
        rounds=bench.rounds,
        warmup_steps=bench.warmup,
        micro_batches=config.data.micro_batches,
        host_budget_bytes=config.host_budget,
        micro=micro,
        layer=layer,
        one=found.get(Way.ONE),
        larger=found.get(Way.LARGER),
        moved_bytes_ratio=moved,
        round_speed_up_ratio=speed_ups,
        speed_up_ratio=speed_up,
        of_bytes_ratio=speed_up / moved if moved else 0.0,
        same_losses=_same_losses(rounds[Way.MICRO], rounds[Way.LAYER]),
    )


def _steps(rounds: Sequence[RoundSteps], planned: int) -> WaySteps:
    seconds = [value for one in rounds for value in one.step_s]
    count, peak = len(seconds), max(one.peak_resident_bytes for one in rounds)
    spilled = sum(one.spilled_bytes for one in rounds) // count
    return WaySteps(
        step_samples_s=seconds,
        step_median_s=statistics.median(seconds),
        step_moved_bytes=sum(one.read_bytes + one.written_bytes for one in rounds) // count + spilled,
        step_spilled_bytes=spilled,
        step_cpu_s=sum(one.cpu_s for one in rounds) / count,
        step_stall_s=sum(sum(one.stall_s_by_cause.values()) for one in rounds) / count,
        peak_resident_bytes=peak,
        planned_resident_bytes=planned,
        peak_to_plan_ratio=peak / planned,
    )


def _same_losses(micro: Sequence[RoundSteps], layer: Sequence[RoundSteps]) -> bool:
    """Whether both orders computed the same."""
    return [one.losses for one in micro] == [one.losses for one in layer]


def measurements(result: OrderResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for way in Way:
        found: WaySteps | None = getattr(result, way.value)
        if found is None:
            continue
        how = {"way": way.value}
        yield measured("step", found.step_samples_s, "s", Better.LOWER, parameters=how)
        yield measured(
            "peak resident memory", found.peak_resident_bytes, "bytes", Better.LOWER, parameters=how
        )
        yield counted("moved a step", found.step_moved_bytes, "bytes", Better.LOWER, parameters=how)
    yield derived("speed-up", result.round_speed_up_ratio, "ratio", Better.HIGHER)
    of_bytes = [
        each / result.moved_bytes_ratio for each in result.round_speed_up_ratio if result.moved_bytes_ratio
    ]
    yield derived("speed-up of bytes", of_bytes, "ratio", Better.HIGHER, target=_OF_BYTES)
