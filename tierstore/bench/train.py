"""The same training steps in several runs that take turns (docs/BENCH.md).

With everything in RAM and with experts on disk: how near the latter are to their bound (``train_bound``). With --orders:
steps of several micro-batches in micro order and in layer order; the speed-up beside the ratio of the bytes moved, spilled
block inputs included, which it cannot exceed if the disk is the only limit. Two further ways show memory: one micro-batch,
and one of M-fold size whose blocks are checkpointed.

Each run has its own process (``train_process``). All are open side by side and step in turns, so that a drift in the
machine's speed affects them alike, each has its own peak memory, and only one computes at a time. The machine needs memory
for all of them at once. Figures are medians; ratios are those of the rounds.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tierstore.bench.documents import Better, Measurement, counted, derived, measured
from tierstore.bench.harness import (
    Benchmark,
    FigureTable,
    Found,
    Progress,
    prefixed,
    ratios,
    size_option,
    store_option,
    work_directory,
)
from tierstore.bench.probes import Bytes, DiskProbe, MemoryLimit, page_cache_bytes
from tierstore.bench.train_bound import Compulsory, bound_s, compulsory
from tierstore.bench.train_process import PARTS, RoundSteps, TrainingProcess
from tierstore.config import check_least, option
from tierstore.errors import ConfigError
from tierstore.model.config import CheckpointActivations
from tierstore.stats import spread
from tierstore.store.format import COMMITTED_GROUPS
from tierstore.train.budgets import expert_schema
from tierstore.train.config import TrainConfig
from tierstore.train.files import MicroOrder
from tierstore.units import format_bytes

_TO_BOUND = 1.15  # the most that a step may take, relative to its bound
_CPU_TO_IN_RAM = 1.05  # the most processor time of a tiered step, relative to one in RAM
_OF_BYTES = 0.85  # least speed-up, relative to the ratio of bytes, if the disk is the limit
_PROBE_BYTES = 1 << 30
_PROBE_SHARE = 0.5  # of one step's bytes are moved for one measurement ...
_PROBE_LEAST_BYTES = 256 << 20  # ... but at least these
_MICRO_BATCHES = 4  # with --orders, if none are configured


class Baseline(Enum):
    """What the tiered run is compared with."""

    IN_RAM = "in-ram"
    NONE = "none"


class Way(Enum):
    """How a step is taken."""

    MICRO = "micro"
    LAYER = "layer"
    #: A step of a single micro-batch, of the same size.
    ONE = "one"
    #: The same tokens in one micro-batch, with checkpointed blocks.
    LARGER = "larger"

    def of(self, config: TrainConfig) -> TrainConfig:
        """``config`` for steps taken in this way."""
        data = config.data
        if self is Way.ONE:
            return replace(config, data=replace(data, micro_batches=1))
        if self is Way.LARGER:
            model = config.model.vary("checkpoint_activations", CheckpointActivations.BLOCK)
            data = replace(data, micro_batches=1, batch_size=data.batch_size * data.micro_batches)
            return replace(config, data=data, model=model or config.model)
        return replace(config, data=replace(data, micro_order=MicroOrder(self.value)))


@dataclass(frozen=True, kw_only=True)
class TrainBench(Benchmark):
    """The same steps with everything in RAM and with experts on disk, in turns; with --orders, in two step orders.

    Exit status 1: the runs computed different losses.
    """

    steps: int = option(5, "Steps of one round.")
    warmup: int = option(5, "Steps before the first round.")
    rounds: int = option(3, "Rounds.")
    host_budget: int | None = option(
        None, "Memory for experts in the tiered run.", size=True, key="host_budget"
    )
    store: Path = store_option(key="store")
    baseline: Baseline = option(Baseline.IN_RAM, "Comparison; none for models that do not fit in RAM.")
    cgroup_limit: int = size_option("0", "Memory cgroup of the tiered run.")
    orders: bool = option(False, "Compare micro order with layer order instead.")
    micro_batches: int | None = option(
        None, "Per step (with --orders by default data.micro_batches, or 4).", key="data.micro_batches"
    )
    boundary_budget: int | None = option(
        None, "Memory for block inputs (default: enough for all).", size=True, key="boundary_budget"
    )
    disk_bandwidth: int | None = option(
        None, "Limit the disk to N bytes a second.", size=True, key="links.disk.bandwidth"
    )
    also: tuple[Way, ...] = option(
        (),
        "With --orders: one micro-batch, or all tokens in one with checkpointed blocks.",
        choices=(Way.ONE, Way.LARGER),
    )
    train: TrainConfig = field(default_factory=TrainConfig, metadata={"configuration": ()})

    def __post_init__(self) -> None:
        check_least(self, 1, "steps", "rounds")
        check_least(self, 0, "warmup", "cgroup_limit")
        if self.also and not self.orders:
            raise ConfigError("--also: requires --orders")
        if self.orders and (self.cgroup_limit or self.baseline is not Baseline.IN_RAM):
            raise ConfigError("--cgroup-limit and --baseline cannot be combined with --orders")

    @property
    def saved_as(self) -> str | None:
        return "order" if self.orders else None

    def run(self, progress: Progress) -> Found:
        """Measure. Raises ConfigError (the store exists), BudgetError, CapabilityError, WorkerError, OSError."""
        config = replace(self.train, steps=self.warmup + self.steps * self.rounds)
        if self.orders:
            return _compare_orders(self, config, progress)
        with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
            limit = None
            if self.cgroup_limit:
                limit = stack.enter_context(contextlib.closing(MemoryLimit(self.cgroup_limit)))
            rounds = _measure(config, self, limit, progress)
            cgroup = None if limit is None else limit.use()
            counted = self.steps * self.rounds
            least = compulsory(directory / "trace", first_step=self.warmup, steps=counted)
        figures = _figures(config, self, rounds, least)
        if cgroup is not None:
            figures |= prefixed("cgroup_", cgroup)
        return Found(
            figures=figures,
            measurements=list(_measurements(figures)),
            shown=[_table(figures), *figures["effective"]],
            failed=figures["same_losses"] is False,
        )


# In RAM and tiered ------------------------------------------------------------------------------------------


class StepDisk(DiskProbe):
    """The disk's speed for a share of the bytes of a step, ``mix``, with the transfer sizes of ``config``."""

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


@dataclass(kw_only=True)
class _Rounds:
    """Both runs, by round; the tiered run's own description when opened, and the size of its files at the end."""

    opened: Mapping[str, Any]
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
        if self.in_ram:
            losses = zip(self.tiered[-1].losses, self.in_ram[-1].losses, strict=True)
            differing = (
                f"step {i} differs: loss {a!r}, in RAM {b!r}" for i, (a, b) in enumerate(losses, 1) if a != b
            )
            parts += [*differing][:1]
        return ", ".join(parts)


def _medians(rounds: Sequence[RoundSteps]) -> list[float]:
    return [statistics.median(one.step_s) for one in rounds]


def _measure(
    config: TrainConfig, bench: TrainBench, limit: MemoryLimit | None, progress: Progress
) -> _Rounds:
    """Measure the rounds. Both processes have ended then, so the trace is complete."""
    directory, store = config.store, config.store / "tiered"
    with contextlib.ExitStack() as stack:
        progress.say("opening the tiered run")
        own, trace = replace(config, store=store), directory / "trace"
        tiered = TrainingProcess("tiered", own, warmup=bench.warmup, trace=trace, limit=limit)
        stack.callback(tiered.close)
        whole = None
        if bench.baseline is Baseline.IN_RAM:
            progress.say("opening the run in RAM")
            own = replace(in_ram(config), store=directory / "in-ram")
            whole = TrainingProcess("in RAM", own, warmup=bench.warmup)
            stack.callback(whole.close)
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
            progress.say(f"round {turn + 1} of {bench.rounds}: {rounds.progress}")
        extents = sorted(store.rglob("extents/*"))
        rounds.page_cache_bytes = page_cache_bytes(extents)
        rounds.extent_bytes = sum(path.stat().st_size for path in extents)
    return rounds


def _figures(config: TrainConfig, bench: TrainBench, rounds: _Rounds, least: Compulsory) -> dict[str, Any]:
    """Evaluate the rounds. Compulsory and clairvoyant bytes are those of one step."""
    count = bench.steps * bench.rounds
    moved = least.least.per(count)
    tiered, whole = _medians(rounds.tiered), _medians(rounds.in_ram)
    speeds = rounds.disk_bytes_per_s or [float("inf")] * bench.rounds
    bounds = [
        bound_s(ram, moved, speed) for ram, speed in zip(whole or [0.0] * bench.rounds, speeds, strict=True)
    ]
    to_bound = ratios(tiered, bounds)
    of_cpu = [a.cpu_s / b.cpu_s for a, b in zip(rounds.tiered, rounds.in_ram, strict=False)]
    times = _step_times(rounds.tiered)
    architecture = config.model.architecture
    figures: dict[str, Any] = {
        "bench": "train",
        "steps": bench.steps,
        "rounds": bench.rounds,
        "warmup_steps": bench.warmup,
        "parameters": architecture.parameters,
        "experts": architecture.records,
        "record_bytes": architecture.records * expert_schema(config).record_bytes,
        "host_budget_bytes": config.host_budget,
        **rounds.opened,
        "extent_bytes": rounds.extent_bytes,
        "page_cache_bytes": rounds.page_cache_bytes,
        "tiered": times,
        "tiered_parts": _parts(rounds.tiered),
        "in_ram_parts": _parts(rounds.in_ram),
        "compulsory_policy": least.policy,
        "compulsory_read_bytes": moved.read,
        "compulsory_written_bytes": moved.written,
        "policies": [
            {"policy": name, "step_moved_bytes": total.per(count).total}
            for name, total in least.by_policy.items()
        ],
        "clairvoyant_bytes": least.clairvoyant.per(count).total,
        "disk_bytes_per_s": statistics.median(speeds) if rounds.disk_bytes_per_s else None,
        "round_disk_bytes_per_s": rounds.disk_bytes_per_s,
        "round_step_to_bound_ratio": to_bound,
        "compulsory_s": statistics.median(moved.total / speed for speed in speeds),
        "bound_s": statistics.median(bounds),
        "step_to_bound_ratio": statistics.median(to_bound),
        "step_to_in_ram_ratio": statistics.median(ratios(tiered, whole)) if whole else None,
        "round_cpu_to_in_ram_ratio": of_cpu,
        "cpu_to_in_ram_ratio": statistics.median(of_cpu) if of_cpu else None,
        "same_losses": same_losses(rounds.tiered, rounds.in_ram) if whole else None,
        "tokens_per_s": config.tokens_per_step / times["step_median_s"],
    }
    return figures | ({"in_ram": _step_times(rounds.in_ram)} if whole else {})


def _step_times(rounds: Sequence[RoundSteps]) -> dict[str, Any]:
    """The steps of one run; values are means over all steps unless named otherwise."""
    seconds = [value for one in rounds for value in one.step_s]
    count, step = len(seconds), spread(seconds)
    hits, misses = sum(one.hits for one in rounds), sum(one.misses for one in rounds)
    causes = sorted({cause for one in rounds for cause in one.stall_s_by_cause})
    stalled = {cause: sum(one.stall_s_by_cause.get(cause, 0.0) for one in rounds) / count for cause in causes}
    return {
        "step_samples_s": seconds,
        "step_median_s": step.median,
        "step_p10_s": step.p10,
        "step_p90_s": step.p90,
        "step_least_s": step.least,
        "step_cpu_s": sum(one.cpu_s for one in rounds) / count,
        "step_read_bytes": sum(one.read_bytes for one in rounds) // count,
        "step_written_bytes": sum(one.written_bytes for one in rounds) // count,
        "hit_ratio": hits / max(hits + misses, 1),
        "wasted_prefetch_bytes": sum(one.wasted_prefetch_bytes for one in rounds),
        "stalls": [{"cause": cause, "step_stall_s": spent} for cause, spent in stalled.items()],
        "peak_resident_bytes": max(one.peak_resident_bytes for one in rounds),
        "last_loss": rounds[-1].losses[-1],
    }


def _parts(rounds: Sequence[RoundSteps]) -> list[dict[str, Any]]:
    """The parts of the mean step (``tierstore.train.step_time``)."""
    count = sum(len(one.step_s) for one in rounds)
    return [
        {"part": name, "step_part_s": sum(one.part_s[name] for one in rounds) / count}
        for name in PARTS
        if rounds and all(name in one.part_s for one in rounds)
    ]


def same_losses(one: Sequence[RoundSteps], other: Sequence[RoundSteps]) -> bool:
    """Whether both runs computed the same losses."""
    return [each.losses for each in one] == [each.losses for each in other]


def _measurements(figures: Mapping[str, Any]) -> Iterator[Measurement]:
    for key, name in (("in_ram", "in ram"), ("tiered", "tiered")):
        if key in figures:
            yield from _of_run(figures[key], {"run": name})
    if speeds := figures["round_disk_bytes_per_s"]:
        yield measured("disk, same mix", speeds, "bytes/s")
    # Without a run in RAM the bound is the disk's alone, and has no target.
    target = _TO_BOUND if "in_ram" in figures else None
    to_bound = figures["round_step_to_bound_ratio"]
    yield derived("step to bound", to_bound, "ratio", Better.LOWER, target=target)
    if of_cpu := figures["round_cpu_to_in_ram_ratio"]:
        name = "processor time to that in ram"
        yield derived(name, of_cpu, "ratio", Better.LOWER, target=_CPU_TO_IN_RAM)


def _of_run(of: Mapping[str, Any], how: dict[str, float | str]) -> Iterator[Measurement]:
    lower = Better.LOWER
    yield measured("step", of["step_samples_s"], "s", parameters=how)
    yield measured("processor time a step", of["step_cpu_s"], "s", parameters=how)
    yield measured("peak resident memory", of["peak_resident_bytes"], "bytes", lower, parameters=how)
    yield counted("read a step", of["step_read_bytes"], "bytes", lower, parameters=how)
    yield counted("written a step", of["step_written_bytes"], "bytes", lower, parameters=how)
    yield counted("hits", of["hit_ratio"], "ratio", Better.HIGHER, parameters=how)
    for stall in of["stalls"]:
        caused = how | {"cause": stall["cause"]}
        yield measured("stalled a step", stall["step_stall_s"], "s", parameters=caused)


#: The parts of the mean step, for people.
_PART_NAMES = {
    "computing_s": "the driving thread computes",
    "torch_cpu_s": "torch's other threads compute",
    "engine_cpu_s": "the engine's threads compute",
    "run_queue_s": "the driving thread waits for a processor",
    "stolen_s": "the hypervisor took it",
    "threads_s": "the driving thread waits for others",
    "unaccounted_s": "unaccounted",
}


def _table(figures: Mapping[str, Any]) -> FigureTable:
    rows = {
        "step, median": "step_median_s",
        "step, 10%": "step_p10_s",
        "step, 90%": "step_p90_s",
        "CPU time a step, all threads": "step_cpu_s",
        "read a step": "step_read_bytes",
        "written a step": "step_written_bytes",
        "hits": "hit_ratio",
        "peak resident memory": "peak_resident_bytes",
        **{f"  {title}": f"parts.{name}" for name, title in _PART_NAMES.items()},
        "compulsory bytes, read": "compulsory_read_bytes",
        "compulsory bytes, written": "compulsory_written_bytes",
        "of a clairvoyant policy, in all": "clairvoyant_bytes",
        "they take at the disk's speed": "compulsory_s",
        "bound of a step": "bound_s",
        "step / step in RAM": "step_to_in_ram_ratio",
        "same losses": "same_losses",
    }
    runs = {"in RAM": "in_ram", "tiered": "tiered"}
    objects: dict[str, dict[str, Any]] = {}
    for title, key in runs.items():
        if key in figures:
            parts = {part["part"]: part["step_part_s"] for part in figures[f"{key}_parts"]}
            objects[title] = {**figures[key], "parts": parts}
    objects["tiered"] |= {key: figures[key] for key in rows.values() if key in figures}
    title = (
        f"{figures['parameters'] / 1e6:.0f} M parameters, {format_bytes(figures['record_bytes'])} of expert records, "
        f"host budget {format_bytes(figures['host_budget_bytes'])}, {figures['tokens_per_s']:.0f} tokens/s"
    )
    return FigureTable.transposed(title, rows, objects)


# Step orders ------------------------------------------------------------------------------------------------

_ORDERS = (Way.MICRO, Way.LAYER)


def _compare_orders(bench: TrainBench, config: TrainConfig, progress: Progress) -> Found:
    if config.data.micro_batches == 1 and bench.micro_batches is None:
        config = replace(config, data=replace(config.data, micro_batches=_MICRO_BATCHES))
    if config.data.micro_batches < 2:
        raise ConfigError(
            f"data.micro_batches: expected at least 2 for an order, got {config.data.micro_batches}"
        )
    ways = tuple(dict.fromkeys((*_ORDERS, *bench.also)))
    rounds: dict[Way, list[RoundSteps]] = {way: [] for way in ways}
    found: dict[Way, dict[str, Any]] = {}
    with work_directory(config.store) as directory, contextlib.ExitStack() as stack:
        processes: dict[Way, TrainingProcess] = {}
        for way in ways:
            progress.say(f"opening the run: {way.value}")
            own = replace(way.of(config), store=directory / way.value)
            processes[way] = TrainingProcess(way.value, own, warmup=bench.warmup)
            stack.callback(processes[way].close)
        for turn in range(bench.rounds):
            for way, process in processes.items():
                rounds[way].append(process.run(bench.steps))
            medians = ", ".join(f"{way.value} {_medians(of)[-1]:.3f} s" for way, of in rounds.items())
            progress.say(f"round {turn + 1} of {bench.rounds}: {medians}")
        for way, process in processes.items():
            planned = process.opened["fixed_resident_bytes"] + config.host_budget
            found[way] = _way_steps(rounds[way], planned)
    speed_ups = ratios(_medians(rounds[Way.MICRO]), _medians(rounds[Way.LAYER]))
    moved = found[Way.MICRO]["step_moved_bytes"] / max(found[Way.LAYER]["step_moved_bytes"], 1)
    speed_up = statistics.median(speed_ups)
    same = same_losses(rounds[Way.MICRO], rounds[Way.LAYER])
    figures = {
        "bench": "order",
        "steps": bench.steps,
        "rounds": bench.rounds,
        "warmup_steps": bench.warmup,
        "micro_batches_count": config.data.micro_batches,
        "host_budget_bytes": config.host_budget,
        **{way.value: times for way, times in found.items()},
        "moved_bytes_ratio": moved,
        "round_speed_up_ratio": speed_ups,
        "speed_up_ratio": speed_up,
        "of_bytes_ratio": speed_up / moved if moved else 0.0,
        "same_losses": same,
    }
    measurements = []
    for way, times in found.items():
        how = {"way": way.value}
        measurements += [
            measured("step", times["step_samples_s"], "s", parameters=how),
            measured(
                "peak resident memory", times["peak_resident_bytes"], "bytes", Better.LOWER, parameters=how
            ),
            counted("moved a step", times["step_moved_bytes"], "bytes", Better.LOWER, parameters=how),
        ]
    of_bytes = [each / moved for each in speed_ups if moved]
    measurements += [
        derived("speed-up", speed_ups, "ratio", Better.HIGHER),
        derived("speed-up of bytes", of_bytes, "ratio", Better.HIGHER, target=_OF_BYTES),
    ]
    table = FigureTable.transposed(
        f"{config.data.micro_batches} micro-batches a step, host budget {format_bytes(config.host_budget)}",
        {
            "step, median": "step_median_s",
            "moved a step": "step_moved_bytes",
            "of it block inputs": "step_spilled_bytes",
            "CPU time a step, all threads": "step_cpu_s",
            "stalled a step": "step_stall_s",
            "peak resident memory": "peak_resident_bytes",
            "of the plan": "peak_to_plan_ratio",
        },
        {way.value: times for way, times in found.items()},
    )
    line = f"layer order moves {moved:.2f} x fewer bytes; same losses: {'yes' if same else 'NO'}"
    return Found(figures=figures, measurements=measurements, shown=[table, line], failed=not same)


def _way_steps(rounds: Sequence[RoundSteps], planned: int) -> dict[str, Any]:
    """Steps of one way; ``planned``: bytes of its budgets plus its announced fixed memory."""
    times = _step_times(rounds)
    spilled = sum(one.spilled_bytes for one in rounds) // len(times["step_samples_s"])
    return {
        **times,
        "step_moved_bytes": times["step_read_bytes"] + times["step_written_bytes"] + spilled,
        "step_spilled_bytes": spilled,
        "step_stall_s": sum(stall["step_stall_s"] for stall in times["stalls"]),
        "planned_resident_bytes": planned,
        "peak_to_plan_ratio": times["peak_resident_bytes"] / planned,
    }
