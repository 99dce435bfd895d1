"""The same training steps with everything in RAM and with experts on disk, and how near to
their bound the latter are (docs/BENCH.md; ``tierstore.bench.training.bound``).

Both run in processes of their own, which are open side by side and step in turns: a machine whose speed drifts treats them
alike, each has a peak memory of its own, and only one computes at a time. The machine needs memory for both at once;
``Baseline.NONE`` leaves the run in RAM out, for models that do not fit. The result is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from tierstore.bench.checks import at_least, work_directory
from tierstore.bench.probes.disk import Bytes, DiskProbe
from tierstore.bench.probes.memory_limit import MemoryLimit, MemoryUse, page_cache_bytes
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.results.figures import IF_ANY, Figures, StallTime, prefixed, ratios
from tierstore.bench.training.bound import Compulsory, bound_s, compulsory
from tierstore.bench.training.worker import PARTS, Opened, RoundSteps, TrainingProcess
from tierstore.stats import spread
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.train.budgets import expert_schema
from tierstore.train.config import TrainConfig

_TO_BOUND = 1.15  # what a step may take at most, in times of its bound
_CPU_TO_IN_RAM = 1.05  # what processor time a tiered step may take at most, in times of one in RAM
_PROBE_BYTES = 1 << 30
_PROBE_SHARE = 0.5  # of one step's bytes, moved for one measurement ...
_PROBE_LEAST_BYTES = 256 << 20  # ... but no fewer than these


class Baseline(Enum):
    """What the tiered run is compared with."""

    IN_RAM = "in-ram"
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """How long to measure. ``cgroup_limit`` (bytes; 0: none) confines the tiered run."""

    steps: int = 5
    warmup: int = 5
    rounds: int = 3
    baseline: Baseline = Baseline.IN_RAM
    cgroup_limit: int = 0

    def __post_init__(self) -> None:
        at_least(1, steps=self.steps, rounds=self.rounds)
        at_least(0, warmup=self.warmup, cgroup_limit=self.cgroup_limit)


@dataclass(frozen=True, kw_only=True)
class StepPart(Figures):
    """A part of a step's time, as ``tierstore.train.step_time`` divides it: the mean of a step."""

    part: str
    step_part_s: float


def _parts(rounds: Sequence[RoundSteps]) -> list[StepPart]:
    count = sum(len(one.step_s) for one in rounds)
    return [
        StepPart(part=name, step_part_s=sum(one.part_s[name] for one in rounds) / count)
        for name in PARTS
        if rounds and all(name in one.part_s for one in rounds)
    ]


@dataclass(frozen=True, kw_only=True)
class StepTimes(Figures):
    """The steps of one run: means over all steps, but for what says otherwise."""

    step_samples_s: Sequence[float]
    step_median_s: float
    step_p10_s: float
    step_p90_s: float
    step_least_s: float
    step_cpu_s: float
    step_read_bytes: int
    step_written_bytes: int
    hit_ratio: float
    wasted_prefetch_bytes: int
    stalls: Sequence[StallTime]
    peak_resident_bytes: int
    last_loss: float

    @staticmethod
    def of(rounds: Sequence[RoundSteps]) -> StepTimes:
        seconds = [value for one in rounds for value in one.step_s]
        count, step = len(seconds), spread(seconds)
        hits, misses = sum(one.hits for one in rounds), sum(one.misses for one in rounds)
        causes = sorted({cause for one in rounds for cause in one.stall_s_by_cause})
        return StepTimes(
            step_samples_s=seconds,
            step_median_s=step.median,
            step_p10_s=step.p10,
            step_p90_s=step.p90,
            step_least_s=step.least,
            step_cpu_s=sum(one.cpu_s for one in rounds) / count,
            step_read_bytes=sum(one.read_bytes for one in rounds) // count,
            step_written_bytes=sum(one.written_bytes for one in rounds) // count,
            hit_ratio=hits / max(hits + misses, 1),
            wasted_prefetch_bytes=sum(one.wasted_prefetch_bytes for one in rounds),
            stalls=[
                StallTime(
                    cause=cause,
                    step_stall_s=sum(one.stall_s_by_cause.get(cause, 0.0) for one in rounds) / count,
                )
                for cause in causes
            ],
            peak_resident_bytes=max(one.peak_resident_bytes for one in rounds),
            last_loss=rounds[-1].losses[-1],
        )

    @property
    def step_stall_s(self) -> float:
        """For all causes."""
        return sum(stall.step_stall_s for stall in self.stalls)


@dataclass(frozen=True, kw_only=True)
class PolicyBytes(Figures):
    """What a step moves under one policy, replayed without speculation."""

    policy: str
    step_moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainResult(Figures):
    """What ``run`` found. Compulsory bytes, and what a clairvoyant policy would move, are those of one step."""

    bench: str = "train"
    steps: int
    rounds: int
    warmup_steps: int
    parameters: int
    experts: int
    record_bytes: int
    host_budget_bytes: int
    effective: Sequence[str]
    fixed_resident_bytes: int
    extent_bytes: int
    page_cache_bytes: int | None
    tiered: StepTimes
    in_ram: StepTimes | None = field(metadata=IF_ANY)
    tiered_parts: Sequence[StepPart]
    in_ram_parts: Sequence[StepPart]
    compulsory_policy: str
    compulsory_read_bytes: int
    compulsory_written_bytes: int
    policies: Sequence[PolicyBytes]
    clairvoyant_bytes: int
    disk_bytes_per_s: float | None
    round_disk_bytes_per_s: Sequence[float]
    round_step_to_bound_ratio: Sequence[float]
    compulsory_s: float
    bound_s: float
    step_to_bound_ratio: float
    step_to_in_ram_ratio: float | None
    round_cpu_to_in_ram_ratio: Sequence[float]
    cpu_to_in_ram_ratio: float | None
    same_losses: bool | None
    tokens_per_s: float
    cgroup: MemoryUse | None = field(metadata=prefixed("cgroup_"))


class StepDisk(DiskProbe):
    """The disk's speed at a share of the bytes of a step, ``mix``, with the transfers of ``config``."""

    def __init__(self, directory: Path, config: TrainConfig, mix: Bytes) -> None:
        layouts = [expert_schema(config).layout(group) for group in COMMITTED_GROUPS]
        super().__init__(directory, _PROBE_BYTES, (layouts[0].nbytes, layouts[1].nbytes), config.io)
        share = min(max(_PROBE_SHARE, _PROBE_LEAST_BYTES / mix.total), 4.0)
        self._mix = Bytes(int(mix.read * share), int(mix.written * share))

    def measured(self) -> float:
        return self.bytes_per_s(self._mix)


def in_ram(config: TrainConfig) -> TrainConfig:
    """``config`` with a host budget for every record, kept gradients and all device slots, and nothing written."""
    from tierstore.tiers import DeviceSlots

    model = config.model
    slots = DeviceSlots(model.expert_shape.numel, model.compute_dtype.torch)
    record = model.expert_shape.numel * (16 if config.keeps_gradients else 12)
    # Sections are rounded up to frames of the arena: a little more than their bytes.
    records = (model.architecture.records + 2) * (record + record // 32 + (1 << 20))
    prefetch = replace(config.prefetch, depth=0)
    cache = replace(config.cache, write_back_every=0)
    return replace(config, host_budget=records + slots.nbytes, prefetch=prefetch, cache=cache)


def run(config: TrainConfig, bench: TrainBench, say: Callable[[str], None] = lambda _: None) -> TrainResult:
    """Measures. ``config.store`` is a directory for stores, made and removed here.

    Raises ConfigError (``config.store`` exists), BudgetError, CapabilityError, WorkerError, OSError.
    """
    config = replace(config, steps=bench.warmup + bench.steps * bench.rounds)
    with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
        limit = None
        if bench.cgroup_limit:
            limit = stack.enter_context(contextlib.closing(MemoryLimit(bench.cgroup_limit)))
        rounds = _measure(config, bench, limit, say)
        cgroup = None if limit is None else limit.use()
        least = compulsory(directory / "trace", first_step=bench.warmup, steps=bench.steps * bench.rounds)
    return _result(config, bench, rounds, least, cgroup)


@dataclass(kw_only=True)
class _Rounds:
    """Both runs, round by round; what the tiered run said when it was open, and what its files take at the end."""

    opened: Opened
    tiered: list[RoundSteps] = field(default_factory=list)
    in_ram: list[RoundSteps] = field(default_factory=list)
    disk_bytes_per_s: list[float] = field(default_factory=list)
    extent_bytes: int = 0
    page_cache_bytes: int | None = None

    @property
    def progress(self) -> str:
        """The last round for people."""
        runs = (("tiered", self.tiered), ("in_ram", self.in_ram))
        parts = [f"{name} {_medians(steps)[-1]:.3f} s" for name, steps in runs if steps]
        if self.disk_bytes_per_s:
            parts.append(f"disk {self.disk_bytes_per_s[-1] / 1e9:.2f} GB/s")
        return ", ".join(parts)


def _medians(rounds: Sequence[RoundSteps]) -> list[float]:
    return [statistics.median(one.step_s) for one in rounds]


def _measure(
    config: TrainConfig, bench: TrainBench, limit: MemoryLimit | None, say: Callable[[str], None]
) -> _Rounds:
    """The rounds, with both processes ended: the trace is whole."""
    directory, store = config.store, config.store / "tiered"
    with contextlib.ExitStack() as stack:
        say("opening the tiered run")
        own = replace(config, store=store)
        tiered = TrainingProcess("tiered", own, trace=directory / "trace", limit=limit)
        stack.callback(tiered.close)
        whole = None
        if bench.baseline is Baseline.IN_RAM:
            say("opening the run in RAM")
            own = replace(in_ram(config), store=directory / "in-ram")
            whole = TrainingProcess("in RAM", own)
            stack.callback(whole.close)
        for process in (tiered, whole):
            if process is not None and bench.warmup:
                process.run(bench.warmup)
        rounds = _Rounds(opened=tiered.opened)
        disk: StepDisk | None = None
        for turn in range(bench.rounds):
            before = [disk.measured()] if disk is not None else []
            found = tiered.run(bench.steps)
            rounds.tiered.append(found)
            mix = Bytes(found.read_bytes, found.written_bytes).per(bench.steps)
            if mix.total:
                disk = disk or stack.enter_context(contextlib.closing(StepDisk(directory, config, mix)))
                rounds.disk_bytes_per_s.append(statistics.harmonic_mean([*before, disk.measured()]))
            if whole is not None:
                rounds.in_ram.append(whole.run(bench.steps))
            say(f"round {turn + 1} of {bench.rounds}: {rounds.progress}")
        extents = sorted(store.rglob("extents/*"))
        rounds.page_cache_bytes = page_cache_bytes(extents)
        rounds.extent_bytes = sum(path.stat().st_size for path in extents)
    return rounds


def _result(
    config: TrainConfig, bench: TrainBench, rounds: _Rounds, least: Compulsory, cgroup: MemoryUse | None
) -> TrainResult:
    count = bench.steps * bench.rounds
    moved = least.least.per(count)
    tiered, whole = _medians(rounds.tiered), _medians(rounds.in_ram)
    speeds = rounds.disk_bytes_per_s or [float("inf")] * bench.rounds
    bounds = [
        bound_s(ram, moved, speed) for ram, speed in zip(whole or [0.0] * bench.rounds, speeds, strict=True)
    ]
    to_bound = ratios(tiered, bounds)
    times = StepTimes.of(rounds.tiered)
    of_cpu = (
        ratios([one.cpu_s for one in rounds.tiered], [one.cpu_s for one in rounds.in_ram]) if whole else []
    )
    return TrainResult(
        steps=bench.steps,
        rounds=bench.rounds,
        warmup_steps=bench.warmup,
        parameters=config.model.architecture.parameters,
        experts=config.model.architecture.records,
        record_bytes=config.model.architecture.records * expert_schema(config).record_bytes,
        host_budget_bytes=config.host_budget,
        effective=rounds.opened.effective,
        fixed_resident_bytes=rounds.opened.fixed_resident_bytes,
        extent_bytes=rounds.extent_bytes,
        page_cache_bytes=rounds.page_cache_bytes,
        tiered=times,
        in_ram=StepTimes.of(rounds.in_ram) if whole else None,
        tiered_parts=_parts(rounds.tiered),
        in_ram_parts=_parts(rounds.in_ram),
        compulsory_policy=least.policy,
        compulsory_read_bytes=moved.read,
        compulsory_written_bytes=moved.written,
        policies=[
            PolicyBytes(policy=name, step_moved_bytes=total.per(count).total)
            for name, total in least.by_policy.items()
        ],
        clairvoyant_bytes=least.clairvoyant.per(count).total,
        disk_bytes_per_s=statistics.median(speeds) if rounds.disk_bytes_per_s else None,
        round_disk_bytes_per_s=rounds.disk_bytes_per_s,
        round_step_to_bound_ratio=to_bound,
        compulsory_s=statistics.median(moved.total / speed for speed in speeds),
        bound_s=statistics.median(bounds),
        step_to_bound_ratio=statistics.median(to_bound),
        step_to_in_ram_ratio=statistics.median(ratios(tiered, whole)) if whole else None,
        round_cpu_to_in_ram_ratio=of_cpu,
        cpu_to_in_ram_ratio=statistics.median(of_cpu) if of_cpu else None,
        same_losses=_same_losses(rounds.tiered, rounds.in_ram) if whole else None,
        tokens_per_s=config.tokens_per_step / times.step_median_s,
        cgroup=cgroup,
    )


def _same_losses(tiered: Sequence[RoundSteps], whole: Sequence[RoundSteps]) -> bool:
    """Whether both runs computed the same."""
    return [one.losses for one in tiered] == [one.losses for one in whole]


def measurements(result: TrainResult) -> Iterator[Measurement]:
    """What ``run`` found, for a document."""
    for name, of in (("in ram", result.in_ram), ("tiered", result.tiered)):
        if of is not None:
            yield from _of_run(of, name)
    if result.round_disk_bytes_per_s:
        yield measured("disk, same mix", result.round_disk_bytes_per_s, "bytes/s", Better.HIGHER)
    # Without a run in RAM the bound is the disk's alone, and nothing was promised of it.
    target = _TO_BOUND if result.in_ram is not None else None
    yield derived("step to bound", result.round_step_to_bound_ratio, "ratio", Better.LOWER, target=target)
    if found := result.round_cpu_to_in_ram_ratio:
        name = "processor time to that in ram"
        yield derived(name, found, "ratio", Better.LOWER, target=_CPU_TO_IN_RAM)


def _of_run(of: StepTimes, name: str) -> Iterator[Measurement]:
    how = {"run": name}
    yield measured("step", of.step_samples_s, "s", Better.LOWER, parameters=how)
    yield measured("processor time a step", of.step_cpu_s, "s", Better.LOWER, parameters=how)
    yield measured("peak resident memory", of.peak_resident_bytes, "bytes", Better.LOWER, parameters=how)
    yield counted("read a step", of.step_read_bytes, "bytes", Better.LOWER, parameters=how)
    yield counted("written a step", of.step_written_bytes, "bytes", Better.LOWER, parameters=how)
    yield counted("hits", of.hit_ratio, "ratio", Better.HIGHER, parameters=how)
    for stall in of.stalls:
        caused = {**how, "cause": stall.cause}
        yield measured("stalled a step", stall.step_stall_s, "s", Better.LOWER, parameters=caused)
