"""The race: the same training by several libraries and by tierstore, in turns, in one run (docs/BENCH.md).

Each rival lives in a process of its own from beginning to end and steps only when it is told to: while one steps, the others
wait. Rounds begin with another one each time. All start from the same weights and take the same batches, learning rates and
clipping, so that their losses must agree; one whose losses do not is no rival, and enters no ratio. One that is not
installed, does not open, or dies is left out with its reason, and the others go on.

Where a memory limit is asked for, each lives in a cgroup of that limit (RLIMIT_DATA where none can be made). One that cannot
be opened in it is opened again without, and the table says so.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.probes.disk import Bytes
from tierstore.bench.probes.memory_limit import MemoryLimit
from tierstore.bench.processes.spawn import WorkerError
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures, ratios
from tierstore.bench.rivals.registry import OURS, OURS_IN_RAM, REFERENCE, RIVALS, TO_BEAT
from tierstore.bench.rivals.worker import Confinement, RivalProcess, RivalSteps
from tierstore.bench.rivals.workload import check_workload
from tierstore.bench.training.bound import Compulsory, bound_s, compulsory
from tierstore.bench.training.run import StepDisk
from tierstore.errors import CapabilityError, ConfigError, DataError
from tierstore.model.config import ModelConfig
from tierstore.stats import spread
from tierstore.train.config import TrainConfig

#: Losses of the first steps agree within this, in nats: sums in another order move the last bits of fp32, and no more.
LOSS_TOLERANCE = 1e-3
#: So many steps are compared. Later ones drift apart: a token near the border of two experts goes to another one.
COMPARED_STEPS = 10
_WITHIN_BOUND = 1.10  # a step may take so much of its bound ...
_TIMES_DEEPSPEED = 4.0  # ... or be so many times faster than DeepSpeed's: whichever is slower is the aim
_RESIDENT_SHARE = 0.35  # of DeepSpeed's


class TrainedModel(Enum):
    """What they train."""

    BUILT_IN = "built-in"
    MIXTRAL = "mixtral"  # of transformers, with the sizes of the built-in model; tierstore wraps it


class RivalOutcome(Enum):
    """What became of a rival."""

    RAN = "ran"
    SKIPPED = "skipped"  # not installed, or it did not open
    DIED = "died"  # in a step
    DISAGREED = "disagreed"  # its losses are others: it trained something else


@dataclass(frozen=True, kw_only=True)
class RivalsBench:
    """How long to measure, and whom. ``memory_limit``: bytes for each process (0: none). ``timeout_s``: for one request,
    which may compile a library's operators. ``settings``: JSON laid over DeepSpeed's configuration.
    """

    rivals: tuple[str, ...] = tuple(RIVALS)
    model: TrainedModel = TrainedModel.BUILT_IN
    steps: int = 2
    warmup: int = 2
    rounds: int = 5
    memory_limit: int = 0
    timeout_s: float = 900.0
    settings: Path | None = None

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rounds=self.rounds, warmup=self.warmup)
        at_least(0, memory_limit=self.memory_limit, timeout_s=self.timeout_s)
        for name in self.rivals:
            if name not in RIVALS:
                raise ConfigError(f"rivals: expected one of {', '.join(RIVALS)}, got {name}")
        if not self.rivals:
            raise ConfigError("rivals: expected at least one")
        if len(set(self.rivals)) != len(self.rivals):
            raise ConfigError(f"rivals: one is named twice: {', '.join(self.rivals)}")


@dataclass(frozen=True, kw_only=True)
class RivalTimes(Figures):
    """The measured steps of one rival: means over all of them, but for what says otherwise.

    Read and written are what its process caused; disk read and written what its disk did meanwhile, whoever asked.
    """

    step_samples_s: Sequence[float]
    round_tokens_per_s: Sequence[float]
    tokens_per_s: float
    tokens_low_per_s: float
    tokens_high_per_s: float
    step_median_s: float
    step_p10_s: float
    step_p90_s: float
    step_cpu_s: float
    round_step_cpu_s: Sequence[float]
    peak_resident_bytes: int
    step_read_bytes: int
    step_written_bytes: int
    disk_step_read_bytes: int | None
    disk_step_written_bytes: int | None

    @staticmethod
    def of(rounds: Sequence[RivalSteps], tokens: int) -> RivalTimes:
        seconds = [value for one in rounds for value in one.step_s]
        count, step = len(seconds), spread(seconds)
        rates = [tokens / value for value in medians(rounds)]
        rate = spread(rates)
        disk = [
            None if None in moved else sum(filter(None, moved)) // count
            for moved in (
                [one.disk_read_bytes for one in rounds],
                [one.disk_written_bytes for one in rounds],
            )
        ]
        return RivalTimes(
            step_samples_s=seconds,
            round_tokens_per_s=rates,
            tokens_per_s=rate.median,
            tokens_low_per_s=rate.least,
            tokens_high_per_s=rate.greatest,
            step_median_s=step.median,
            step_p10_s=step.p10,
            step_p90_s=step.p90,
            step_cpu_s=statistics.median(one.cpu_s / len(one.step_s) for one in rounds),
            round_step_cpu_s=[one.cpu_s / len(one.step_s) for one in rounds],
            peak_resident_bytes=max(one.peak_resident_bytes for one in rounds),
            step_read_bytes=sum(one.read_bytes for one in rounds) // count,
            step_written_bytes=sum(one.written_bytes for one in rounds) // count,
            disk_step_read_bytes=disk[0],
            disk_step_written_bytes=disk[1],
        )


@dataclass(frozen=True, kw_only=True)
class RivalFigures(Figures):
    """What became of one rival. ``memory``: what limited it. ``losses``: of all steps, warm-up included, in nats.
    ``loss_difference``: the largest from the reference within the steps compared, in nats.
    """

    rival: str
    title: str
    outcome: RivalOutcome
    reason: str | None
    memory: str
    description: Sequence[str]
    open_s: float | None
    losses: Sequence[float]
    loss_difference: float | None
    times: RivalTimes | None = field(metadata=IF_ANY)


@dataclass(frozen=True, kw_only=True)
class RivalRatios(Figures):
    """tierstore to one rival: tokens a second and CPU time over rounds, and peak resident memory."""

    rival: str
    round_tokens_ratio: Sequence[float]
    tokens_ratio: float
    cpu_ratio: float
    resident_ratio: float


@dataclass(frozen=True, kw_only=True)
class BoundFigures(Figures):
    """tierstore's step and what it could take at best, as ``bench train`` has it: max(the same in RAM, compulsory bytes over
    the disk's bandwidth for that mix). ``aim_s``: what a step may take, the slower of 1.10 x the bound and DeepSpeed's step
    / 4; None without DeepSpeed. ``in_ram_step_s``: None where tierstore-ram did not take part, and the bound is the disk's.
    """

    compulsory_policy: str
    compulsory_read_bytes: int
    compulsory_written_bytes: int
    disk_bytes_per_s: float | None
    compulsory_s: float
    in_ram_step_s: float | None
    bound_s: float
    round_step_to_bound_ratio: Sequence[float]
    step_to_bound_ratio: float
    aim_s: float | None
    round_step_to_aim_ratio: Sequence[float]
    step_to_aim_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class RivalsResult(Figures):
    """What ``run`` found. ``orders``: who stepped when, round by round."""

    bench: str = "rivals"
    model: TrainedModel
    parameters: int
    tokens_per_step_count: int
    steps: int
    rounds: int
    warmup_steps: int
    threads: int
    clip_norm: float
    host_budget_bytes: int
    memory_limit_bytes: int
    reference: str | None
    compared_steps_count: int
    loss_tolerance: float
    orders: Sequence[Sequence[str]]
    rivals: Sequence[RivalFigures]
    against: Sequence[RivalRatios]
    bound: BoundFigures | None

    @property
    def agreed(self) -> bool:
        """Whether all who ran trained the same."""
        return not any(one.outcome is RivalOutcome.DISAGREED for one in self.rivals)


@dataclass(kw_only=True)
class Entrant:
    """A rival on its way through the race."""

    name: str
    process: RivalProcess | None = None
    outcome: RivalOutcome = RivalOutcome.RAN
    reason: str | None = None
    memory: str = "no limit"
    description: Sequence[str] = ()
    open_s: float | None = None
    warmup: RivalSteps | None = None
    rounds: list[RivalSteps] = field(default_factory=list)

    def leave(self, outcome: RivalOutcome, reason: str) -> None:
        """It takes no further part."""
        self.outcome, self.reason = outcome, reason
        if self.process is not None:
            self.process.close()
            self.process = None

    @property
    def losses(self) -> list[float]:
        warmup = [] if self.warmup is None else [self.warmup]
        return [loss for one in (*warmup, *self.rounds) for loss in one.losses]


def order(names: Sequence[str], number: int) -> list[str]:
    """Who steps in round ``number``: each round begins one further."""
    first = number % max(len(names), 1)
    return [*names[first:], *names[:first]]


def medians(rounds: Sequence[RivalSteps]) -> list[float]:
    """The median step of each round."""
    return [statistics.median(one.step_s) for one in rounds]


# The race ---------------------------------------------------------------------------------------------------


def run(config: TrainConfig, bench: RivalsBench, say: Callable[[str], None] = lambda _: None) -> RivalsResult:
    """Measures. ``config.store`` is a directory for all that is kept on disk, made and removed here.

    Raises ConfigError (what is not part of the comparison; the directory exists), CapabilityError (a Mixtral without
    transformers), OSError. Whatever befalls a rival is in the result.
    """
    check_workload(config)
    count = bench.warmup + bench.steps * bench.rounds
    config = replace(config, steps=max(config.steps, count))
    with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
        race = _Race(config, bench, directory, stack, say)
        race.open()
        race.measure()
        for entrant in race.entrants.values():
            if entrant.process is not None:
                entrant.process.close()
        return race.result()


class _Race:
    def __init__(
        self,
        config: TrainConfig,
        bench: RivalsBench,
        directory: Path,
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._bench, self._directory = config, bench, directory
        self._stack, self._say = stack, say
        self.entrants = {name: Entrant(name=name) for name in bench.rivals}
        self._orders: list[list[str]] = []
        self._disk: StepDisk | None = None
        self._disk_speeds: list[float] = []
        self._checkpoint: Path | None = None

    @property
    def _trace(self) -> Path:
        return self._directory / "trace"

    def open(self) -> None:
        """Opens whoever can be, one after another, and warms them up."""
        if self._bench.model is TrainedModel.MIXTRAL:
            from tierstore.bench.rivals.wrapped import make_mixtral

            self._say("writing the checkpoint of a Mixtral")
            self._checkpoint = self._directory / "mixtral"
            make_mixtral(self._config, self._checkpoint)
        for entrant in self.entrants.values():
            missing = RIVALS[entrant.name].missing()
            if missing is not None:
                entrant.leave(RivalOutcome.SKIPPED, missing)
            elif not self._bench.memory_limit:
                self._begin(entrant, Confinement(), "no limit", "")
            else:
                self._begin_limited(entrant)
            said = "ready" if entrant.reason is None else f"{entrant.outcome.value}: {entrant.reason}"
            self._say(f"{entrant.name}: {said}")

    def _begin_limited(self, entrant: Entrant) -> None:
        limit = self._bench.memory_limit
        try:
            group = MemoryLimit(limit, name=entrant.name)
            confinement, how = Confinement(group=group), "cgroup"
            self._stack.callback(group.close)
        except CapabilityError:
            confinement, how = Confinement(data_bytes=limit), "RLIMIT_DATA"
        self._begin(entrant, confinement, how, "")
        if entrant.process is None:
            reason = entrant.reason
            entrant.outcome, entrant.reason = RivalOutcome.RAN, None
            self._begin(entrant, Confinement(), f"no limit: not in the {how}'s ({reason})", "-free")

    def _begin(self, entrant: Entrant, confinement: Confinement, memory: str, suffix: str) -> None:
        try:
            entrant.process = process = RivalProcess(
                entrant.name,
                config=self._config,
                directory=self._directory / f"{entrant.name}{suffix}",
                timeout_s=self._bench.timeout_s,
                checkpoint=self._checkpoint,
                trace=self._trace if entrant.name == OURS else None,
                settings=self._bench.settings,
                confinement=confinement,
            )
            self._stack.callback(process.close)
            entrant.warmup = process.run(self._bench.warmup)
        except (WorkerError, OSError) as error:
            entrant.leave(RivalOutcome.SKIPPED, str(error))
            return
        entrant.memory = memory
        entrant.description, entrant.open_s = process.ready.description, process.ready.open_s

    def measure(self) -> None:
        """The rounds."""
        for number in range(self._bench.rounds):
            racing = [name for name, entrant in self.entrants.items() if entrant.process is not None]
            self._orders.append(order(racing, number))
            for name in self._orders[-1]:
                self._turn(self.entrants[name])
            said = ", ".join(
                f"{name} {self._config.tokens_per_step / medians(entrant.rounds)[-1]:.0f}"
                for name, entrant in self.entrants.items()
                if entrant.process is not None
            )
            self._say(f"round {number + 1} of {self._bench.rounds}, tokens/s: {said}")

    def _turn(self, entrant: Entrant) -> None:
        assert entrant.process is not None
        ours = entrant.name == OURS
        before = [self._disk.measured()] if ours and self._disk is not None else []
        try:
            found = entrant.process.run(self._bench.steps)
        except (WorkerError, OSError) as error:
            entrant.leave(RivalOutcome.DIED, f"round {len(self._orders)}: {error}")
            self._say(f"{entrant.name}: died: {entrant.reason}")
            return
        entrant.rounds.append(found)
        mix = Bytes(found.read_bytes, found.written_bytes).per(self._bench.steps)
        if ours and mix.total:
            if self._disk is None:
                self._disk = self._stack.enter_context(
                    contextlib.closing(StepDisk(self._directory, self._config, mix))
                )
            self._disk_speeds.append(statistics.harmonic_mean([*before, self._disk.measured()]))

    # What was found -----------------------------------------------------------------------------------------

    def result(self) -> RivalsResult:
        """Call when all processes have ended: the trace is whole then."""
        config, bench = self._config, self._bench
        reference = self._compare()
        figures = [self._figures(entrant, reference) for entrant in self.entrants.values()]
        against = [] if OURS not in self._ran else [*self._against()]
        assert isinstance(config.model, ModelConfig)
        return RivalsResult(
            model=bench.model,
            parameters=self._parameters(),
            tokens_per_step_count=config.tokens_per_step,
            steps=bench.steps,
            rounds=bench.rounds,
            warmup_steps=bench.warmup,
            threads=config.threads,
            clip_norm=config.clip_norm,
            host_budget_bytes=config.host_budget,
            memory_limit_bytes=bench.memory_limit,
            reference=reference,
            compared_steps_count=COMPARED_STEPS,
            loss_tolerance=LOSS_TOLERANCE,
            orders=self._orders,
            rivals=figures,
            against=against,
            bound=self._bound() if OURS in self._ran else None,
        )

    @property
    def _ran(self) -> Mapping[str, Entrant]:
        return {name: one for name, one in self.entrants.items() if one.outcome is RivalOutcome.RAN}

    def _parameters(self) -> int:
        model = self._config.model
        assert isinstance(model, ModelConfig)
        if self._checkpoint is None:
            return model.architecture.parameters
        from tierstore.bench.rivals.wrapped import count_parameters

        return count_parameters(model)

    def _compare(self) -> str | None:
        """Marks whoever trained something else; returns who the others were compared with."""
        names = [*self._ran]
        if not names:
            return None
        reference = REFERENCE if REFERENCE in names else OURS if OURS in names else names[0]
        for name in names:
            apart = difference(self.entrants[reference].losses, self.entrants[name].losses)
            if not apart <= LOSS_TOLERANCE:
                self.entrants[name].leave(
                    RivalOutcome.DISAGREED,
                    f"its losses are up to {apart:.3g} nats from those of {reference}: it trains something else",
                )
        return reference

    def _figures(self, entrant: Entrant, reference: str | None) -> RivalFigures:
        losses = entrant.losses
        apart = (
            difference(self.entrants[reference].losses, losses) if reference is not None and losses else None
        )
        return RivalFigures(
            rival=entrant.name,
            title=RIVALS[entrant.name].title,
            outcome=entrant.outcome,
            reason=entrant.reason,
            memory=entrant.memory,
            description=entrant.description,
            open_s=entrant.open_s,
            losses=losses,
            loss_difference=apart,
            times=RivalTimes.of(entrant.rounds, self._config.tokens_per_step) if entrant.rounds else None,
        )

    def _against(self) -> Iterator[RivalRatios]:
        tokens = self._config.tokens_per_step
        ours = RivalTimes.of(self.entrants[OURS].rounds, tokens)
        for name, entrant in self._ran.items():
            if name == OURS:
                continue
            theirs = RivalTimes.of(entrant.rounds, tokens)
            speeds = ratios(ours.round_tokens_per_s, theirs.round_tokens_per_s)
            yield RivalRatios(
                rival=name,
                round_tokens_ratio=speeds,
                tokens_ratio=statistics.median(speeds),
                cpu_ratio=statistics.median(ratios(ours.round_step_cpu_s, theirs.round_step_cpu_s)),
                resident_ratio=ours.peak_resident_bytes / theirs.peak_resident_bytes,
            )

    def _bound(self) -> BoundFigures | None:
        bench, count = self._bench, self._bench.steps * self._bench.rounds
        try:
            least: Compulsory = compulsory(self._trace, first_step=bench.warmup, steps=count)
        except (DataError, OSError) as error:
            self._say(f"no bound: {error}")
            return None
        moved = least.least.per(count)
        ours, ran = medians(self.entrants[OURS].rounds), self._ran
        in_ram = medians(ran[OURS_IN_RAM].rounds) if OURS_IN_RAM in ran else None
        speeds = self._disk_speeds if len(self._disk_speeds) == len(ours) else [float("inf")] * len(ours)
        bounds = [
            bound_s(ram, moved, speed) for ram, speed in zip(in_ram or [0.0] * len(ours), speeds, strict=True)
        ]
        if not all(bounds):  # everything fits, and nothing says what a step takes in RAM
            return None
        to_bound = ratios(ours, bounds)
        aims = None
        if TO_BEAT in ran:
            slower = [value / _TIMES_DEEPSPEED for value in medians(ran[TO_BEAT].rounds)]
            aims = [max(_WITHIN_BOUND * a, b) for a, b in zip(bounds, slower, strict=True)]
        to_aim = [] if aims is None else ratios(ours, aims)
        return BoundFigures(
            compulsory_policy=least.policy,
            compulsory_read_bytes=moved.read,
            compulsory_written_bytes=moved.written,
            disk_bytes_per_s=statistics.median(speeds) if self._disk_speeds else None,
            compulsory_s=statistics.median(moved.total / speed for speed in speeds),
            in_ram_step_s=None if in_ram is None else statistics.median(in_ram),
            bound_s=statistics.median(bounds),
            round_step_to_bound_ratio=to_bound,
            step_to_bound_ratio=statistics.median(to_bound),
            aim_s=None if aims is None else statistics.median(aims),
            round_step_to_aim_ratio=to_aim,
            step_to_aim_ratio=statistics.median(to_aim) if to_aim else None,
        )


def difference(reference: Sequence[float], losses: Sequence[float]) -> float:
    """The largest between the first losses of both, in nats; infinite where one is not finite."""
    pairs = [*zip(reference, losses, strict=False)][:COMPARED_STEPS]
    apart = [abs(a - b) for a, b in pairs]
    return max((value if value == value else float("inf") for value in apart), default=float("inf"))


def measurements(result: RivalsResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document: of those who ran and trained the same."""
    for one in result.rivals:
        if one.times is None or one.outcome is not RivalOutcome.RAN:
            continue
        times, how = one.times, {"rival": one.rival}
        yield measured("tokens", times.round_tokens_per_s, "tokens/s", Better.HIGHER, parameters=how)
        yield measured("step", times.step_samples_s, "s", Better.LOWER, parameters=how)
        yield measured("processor time a step", times.round_step_cpu_s, "s", Better.LOWER, parameters=how)
        yield measured(
            "peak resident memory", times.peak_resident_bytes, "bytes", Better.LOWER, parameters=how
        )
        yield counted("read a step", times.step_read_bytes, "bytes", Better.LOWER, parameters=how)
        yield counted("written a step", times.step_written_bytes, "bytes", Better.LOWER, parameters=how)
    for against in result.against:
        how = {"rival": against.rival}
        target = _RESIDENT_SHARE if against.rival == TO_BEAT else None
        yield derived("speed to rival's", against.round_tokens_ratio, "ratio", Better.HIGHER, parameters=how)
        yield derived(
            "resident to rival's",
            against.resident_ratio,
            "ratio",
            Better.LOWER,
            parameters=how,
            target=target,
        )
    if result.bound is not None:
        bound = result.bound
        yield derived("step to bound", bound.round_step_to_bound_ratio, "ratio", Better.LOWER)
        if bound.round_step_to_aim_ratio:
            yield derived("step to aim", bound.round_step_to_aim_ratio, "ratio", Better.LOWER, target=1.0)
