"""The same training steps with everything in RAM and with experts on disk, and how near to the bound the
latter are.

Both run in processes of their own, which are open side by side and step in turns: a machine whose speed
drifts treats them alike, each has a peak memory of its own, and only one computes at a time. The disk is
measured just before and just after the tiered steps (in the first round, after), in the same mix of transfer
sizes, reads and writes: not after a rest, from which disks come back faster. The machine needs memory for both
at once; ``Baseline.NONE`` leaves the run in RAM out, for models that do not fit.

Each round gives one ratio: median step of that round, tiered, over ``max(median step of that round in RAM,
compulsory bytes / bandwidth of that round)``. The result is the median of the rounds' ratios. See
``tierstore.bench.training.bound``.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from tierstore.bench.probes.disk import DiskProbe
from tierstore.bench.probes.memory_limit import MemoryLimit, MemoryUse, page_cache_bytes
from tierstore.bench.results.document import Better, Measurement, counted, derived, measured
from tierstore.bench.training.bound import Bytes, Compulsory, bound_s, compulsory
from tierstore.bench.training.worker import TrainingProcess
from tierstore.errors import ConfigError
from tierstore.stats import spread
from tierstore.train.config import TrainConfig

__all__ = ["Baseline", "TrainBench", "in_ram", "measurements", "run"]

_TO_BOUND = 1.15  # what a step may take at most, in times of its bound
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
        for name in ("steps", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("warmup", "cgroup_limit"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected at least 0, got {getattr(self, name)}")


@dataclass
class _Sample:
    """What one run did: a row a round."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def medians(self) -> list[float]:
        return [statistics.median(row["step_s"]) for row in self.rows]

    def figures(self) -> dict[str, Any]:
        seconds = [value for row in self.rows for value in row["step_s"]]
        count = len(seconds)
        step = spread(seconds)
        causes = sorted({cause for row in self.rows for cause in row["stall_s_by_cause"]})

        def total(name: str) -> int:
            return sum(int(row[name]) for row in self.rows)

        return {
            "step_samples_s": seconds,
            "step_median_s": step.median,
            "step_p10_s": step.p10,
            "step_p90_s": step.p90,
            "step_least_s": step.least,
            "step_cpu_s": sum(row["cpu_s"] for row in self.rows) / count,
            "step_read_bytes": total("read_bytes") // count,
            "step_written_bytes": total("written_bytes") // count,
            "hit_ratio": total("hits") / max(total("hits") + total("misses"), 1),
            "wasted_prefetch_bytes": total("wasted_prefetch_bytes"),
            "stalls": [
                {
                    "cause": cause,
                    "step_stall_s": sum(row["stall_s_by_cause"].get(cause, 0.0) for row in self.rows) / count,
                }
                for cause in causes
            ],
            "peak_resident_bytes": max(row["peak_resident_bytes"] for row in self.rows),
            "last_loss": self.rows[-1]["losses"][-1],
        }


class _Disk(DiskProbe):
    """The disk's speed at a share of the bytes of a step, ``mix``, with the transfers of ``config``."""

    def __init__(self, place: Path, config: TrainConfig, mix: Bytes) -> None:
        weights = config.model.expert_numel * config.model.compute_dtype.torch.itemsize
        super().__init__(place, _PROBE_BYTES, (weights, config.model.expert_numel * 12 - weights), config.io)
        share = min(max(_PROBE_SHARE, _PROBE_LEAST_BYTES / mix.total), 4.0)
        self._mix = Bytes(int(mix.read * share), int(mix.written * share))

    def measured(self) -> float:
        return self.bytes_per_s(self._mix)


def in_ram(config: TrainConfig) -> TrainConfig:
    """``config`` with a host budget for every record, kept gradients and all device slots, and nothing written."""
    from tierstore.tiers import DeviceSlots

    model = config.model
    slots = DeviceSlots(model.expert_numel, model.compute_dtype.torch)
    record = model.expert_numel * (16 if config.keeps_gradients else 12)
    # Sections are rounded up to frames of the arena: a little more than their bytes.
    records = (model.expert_count + 2) * (record + record // 32 + (1 << 20))
    prefetch = replace(config.prefetch, depth=0)
    cache = replace(config.cache, write_back_every=0)
    return replace(config, host_budget=records + slots.nbytes, prefetch=prefetch, cache=cache)


def run(
    config: TrainConfig, bench: TrainBench, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measures, and returns figures ready for JSON. ``config.store`` is a directory for stores, emptied at
    exit.

    Raises ConfigError (``config.store`` exists), BudgetError, CapabilityError, WorkerError, OSError.
    """
    if config.store.exists():
        raise ConfigError(f"store: {config.store} exists; the benchmark wants a directory of its own")
    last = bench.warmup + bench.steps * bench.rounds
    config = replace(config, steps=last)
    config.store.mkdir(parents=True)
    try:
        return _run(config, bench, config.store, say)
    finally:
        shutil.rmtree(config.store, ignore_errors=True)


def _run(config: TrainConfig, bench: TrainBench, place: Path, say: Callable[[str], None]) -> dict[str, Any]:
    samples = {"tiered": _Sample(), "in_ram": _Sample()}
    bandwidth: list[float] = []
    trace = place / "trace"
    tiered_store = place / "tiered"
    use: MemoryUse | None = None
    with ExitStack() as stack:
        limit = stack.enter_context(MemoryLimit(bench.cgroup_limit)) if bench.cgroup_limit else None
        runs: dict[str, TrainingProcess] = {}
        say("opening the tiered run")
        # Closed before the trace is read; the limit outlives it.
        inner = stack.enter_context(ExitStack())
        runs["tiered"] = inner.enter_context(
            TrainingProcess("tiered", replace(config, store=tiered_store), trace=trace, limit=limit)
        )
        opened = runs["tiered"].opened
        if bench.baseline is Baseline.IN_RAM:
            say("opening the run in RAM")
            whole = replace(in_ram(config), store=place / "in-ram")
            runs["in_ram"] = inner.enter_context(TrainingProcess("in RAM", whole))
        for process in runs.values():
            if bench.warmup:
                process.run(bench.warmup)
        disk: _Disk | None = None
        for turn in range(bench.rounds):
            before = [disk.measured()] if disk is not None else []
            samples["tiered"].rows.append(runs["tiered"].run(bench.steps))
            row = samples["tiered"].rows[-1]
            mix = Bytes(row["read_bytes"], row["written_bytes"]).per(bench.steps)
            if mix.total:
                if disk is None:
                    disk = inner.enter_context(_Disk(place, config, mix))
                bandwidth.append(statistics.harmonic_mean([*before, disk.measured()]))
            if "in_ram" in runs:
                samples["in_ram"].rows.append(runs["in_ram"].run(bench.steps))
            say(f"round {turn + 1} of {bench.rounds}: " + _progress(samples, bandwidth))
        cached = page_cache_bytes(sorted(tiered_store.rglob("extents/*")))
        extents = sum(path.stat().st_size for path in tiered_store.rglob("extents/*"))
        inner.close()
        if limit is not None:
            use = limit.use()
    least = compulsory(trace, first_step=bench.warmup, steps=bench.steps * bench.rounds)
    figures: dict[str, Any] = {
        "bench": "train",
        "steps": bench.steps,
        "rounds": bench.rounds,
        "warmup_steps": bench.warmup,
        "parameters": config.model.total_parameters,
        "experts": config.model.expert_count,
        "record_bytes": config.model.expert_parameters * 12,
        "host_budget_bytes": config.host_budget,
        "effective": opened["effective"],
        "fixed_resident_bytes": opened["fixed_resident_bytes"],
        "extent_bytes": extents,
        "page_cache_bytes": cached,
        **{name: sample.figures() for name, sample in samples.items() if sample.rows},
        **_bound(bench, samples, bandwidth, least),
    }
    figures["tokens_per_s"] = config.tokens_per_step / figures["tiered"]["step_median_s"]
    if use is not None:
        figures |= {
            "cgroup_limit_bytes": bench.cgroup_limit,
            "cgroup_peak_bytes": use.peak_bytes,
            "cgroup_kills_count": use.kills,
        }
    return figures


def measurements(result: dict[str, Any]) -> list[Measurement]:
    """What ``run`` found, for a document."""
    found = []
    for name in ("in_ram", "tiered"):
        if name not in result:
            continue
        of, how = result[name], {"run": name.replace("_", " ")}
        found += [
            measured("step", of["step_samples_s"], "s", Better.LOWER, parameters=how),
            measured("processor time a step", [of["step_cpu_s"]], "s", Better.LOWER, parameters=how),
            measured(
                "peak resident memory", [of["peak_resident_bytes"]], "bytes", Better.LOWER, parameters=how
            ),
            counted("read a step", of["step_read_bytes"], "bytes", Better.LOWER, parameters=how),
            counted("written a step", of["step_written_bytes"], "bytes", Better.LOWER, parameters=how),
            counted("hits", of["hit_ratio"], "ratio", Better.HIGHER, parameters=how),
            *(
                measured(
                    "stalled a step",
                    [one["step_stall_s"]],
                    "s",
                    Better.LOWER,
                    parameters={**how, "cause": one["cause"]},
                )
                for one in of["stalls"]
            ),
        ]
    if result["round_disk_bytes_per_s"]:
        found.append(measured("disk, same mix", result["round_disk_bytes_per_s"], "bytes/s", Better.HIGHER))
    # Without a run in RAM the bound is the disk's alone, and nothing was promised of it.
    target = _TO_BOUND if "in_ram" in result else None
    ratios = result["round_step_to_bound_ratio"]
    found.append(derived("step to bound", ratios, "ratio", Better.LOWER, target=target))
    return found


def _bound(
    bench: TrainBench, samples: dict[str, _Sample], bandwidth: list[float], least: Compulsory
) -> dict[str, Any]:
    count = bench.steps * bench.rounds
    moved, future = least.least.per(count), least.clairvoyant.per(count)
    tiered, whole = samples["tiered"].medians(), samples["in_ram"].medians() or [0.0] * bench.rounds
    speeds = bandwidth or [float("inf")] * bench.rounds
    bounds = [bound_s(ram, moved, speed) for ram, speed in zip(whole, speeds, strict=True)]
    ratios = [step / bound for step, bound in zip(tiered, bounds, strict=True)]
    return {
        "compulsory_policy": least.policy,
        "compulsory_read_bytes": moved.read,
        "compulsory_written_bytes": moved.written,
        "policies": [
            {"policy": name, "step_moved_bytes": total.per(count).total}
            for name, total in least.by_policy.items()
        ],
        "clairvoyant_bytes": future.total,
        "disk_bytes_per_s": statistics.median(bandwidth) if bandwidth else None,
        "round_disk_bytes_per_s": bandwidth,
        "round_step_to_bound_ratio": ratios,
        "compulsory_s": statistics.median(moved.total / speed for speed in speeds),
        "bound_s": statistics.median(bounds),
        "step_to_bound_ratio": statistics.median(ratios),
        "step_to_in_ram_ratio": (
            statistics.median(step / ram for step, ram in zip(tiered, whole, strict=True))
            if whole[0]
            else None
        ),
        "same_losses": _same_losses(samples),
    }


def _same_losses(samples: dict[str, _Sample]) -> bool | None:
    """Whether both runs computed the same: None when there was one only."""
    if not samples["in_ram"].rows:
        return None
    losses = [[loss for row in sample.rows for loss in row["losses"]] for sample in samples.values()]
    return losses[0] == losses[1]


def _progress(samples: dict[str, _Sample], bandwidth: list[float]) -> str:
    parts = [f"{name} {sample.medians()[-1]:.3f} s" for name, sample in samples.items() if sample.rows]
    if bandwidth:
        parts.append(f"disk {bandwidth[-1] / 1e9:.2f} GB/s")
    return ", ".join(parts)
