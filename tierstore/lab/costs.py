"""The cost of misses: stalls, drive writes, drive life. All are estimated from a stated machine.

A machine is a profile, as ``tierstore bench machine`` measures it and ``tierstore plan`` predicts from (by default its
assumed figures), and the figures given in place of the profile's. One transfer of that profile is one entry, so a layer
pass (one event) takes

    fetch = entries read x latency + bytes read / bandwidth + the same of what is written

on the tier below. If the pass both reads and writes and a cost of mixed traffic is known, that cost applies to all bytes.
The computation of a step is given, or predicted by ``plan`` from a run's configuration. It is split over the step's
passes, a backward pass counting twice a forward one. A pass waits for

    serial:        fetch                              (entries are read when they are needed)
    lookahead 1:   max(0, fetch - compute before it)  (fetched while the pass before it computes)

The first pass of a trace has nothing before it. A policy's own time is measured, not modelled: ``Outcome.policy_s`` is
the CPU time of one replay, and ``policy_time`` measures several.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tierstore._native import Detail
from tierstore.cache.access import Phase
from tierstore.config import check_least, check_positive
from tierstore.lab.requests import Requests
from tierstore.lab.results import Outcome
from tierstore.lab.simulate import Replayed, ReplaySetting, replay_one
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile
from tierstore.units import DAY_S, drive_life_s, format_seconds

if TYPE_CHECKING:  # a run's configuration, if given
    from tierstore.train.config import TrainConfig

_YEAR_S = 365.25 * DAY_S
_BACKWARD_WEIGHT = 2.0
_ASSUMED_ENDURANCE, _ASSUMED_DRIVE = 600e12, 1e12
_GIVEN = "given"


class Overlap(enum.Enum):
    """Whether a pass's entries are fetched while the previous pass computes."""

    LOOKAHEAD = "lookahead"
    SERIAL = "serial"


class Objective(enum.Enum):
    """The cost that a choice minimises."""

    MISSES = "misses"
    BYTES = "bytes"  # read and written
    STALL = "stall"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine that estimates assume. Bandwidths in bytes/s, endurance and drive size in bytes, times in seconds.

    None takes the profile's figure, or the assumed one. A given bandwidth has no latency; if that of reads or
    writes is given and that of mixed traffic is not, a pass reads and writes in turn. ``plan`` predicts the computation
    of the configuration ``run``. Raises ConfigError for impossible numbers, BudgetError for an impossible run.
    """

    profile: Profile = ASSUMED
    run: TrainConfig | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    mixed_bytes_per_s: float | None = None
    compute_s_per_step: float | None = None  # None: the one of ``run``, or 0
    overlap: Overlap = Overlap.LOOKAHEAD
    endurance_bytes: float | None = None  # bytes that may be written under the maker's warranty (TBW)
    drive_bytes: float | None = None
    steps_per_s: float | None = None  # None: from computation and stalls
    compute_s: float = field(init=False)  # of a step: given or predicted

    def __post_init__(self) -> None:
        check_positive(self, "read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s")
        check_positive(self, "endurance_bytes", "drive_bytes", "steps_per_s")
        check_least(self, 0, "compute_s_per_step")
        compute = self.compute_s_per_step
        if compute is None:
            compute = 0.0 if self.run is None else _predicted_compute_s(self.run, self.profile)
        object.__setattr__(self, "compute_s", compute)

    @property
    def read(self) -> Cost:
        """The cost of reading an entry."""
        return self.profile.disk_read if self.read_bytes_per_s is None else Cost(0.0, self.read_bytes_per_s)

    @property
    def write(self) -> Cost:
        """The cost of writing an entry."""
        return (
            self.profile.disk_write if self.write_bytes_per_s is None else Cost(0.0, self.write_bytes_per_s)
        )

    @property
    def mixed(self) -> Cost | None:
        """The cost of an entry of mixed traffic; None: reads and writes in turn."""
        if self.mixed_bytes_per_s is not None:
            return Cost(0.0, self.mixed_bytes_per_s)
        in_turn = self.read_bytes_per_s is not None or self.write_bytes_per_s is not None
        return None if in_turn else self.profile.disk_mixed

    @property
    def _origins(self) -> tuple[str, str, str, str]:
        """The sources of the costs of reads, writes and mixed traffic, and of the computation."""
        profile = self.profile
        measured = profile.evidence is Evidence.MEASURED
        origin = f"measured profile: {profile.machine}" if measured else Evidence.ASSUMED.value
        given = (self.read_bytes_per_s, self.write_bytes_per_s, self.mixed_bytes_per_s)
        read, write, mixed = (origin if one is None else _GIVEN for one in given)
        compute = Evidence.ASSUMED.value if self.run is None else f"predicted by plan, {origin}"
        return read, write, mixed, compute if self.compute_s_per_step is None else _GIVEN

    @property
    def source(self) -> str:
        """The sources of the numbers, in short: for the head of a table."""
        *disk, compute = self._origins
        return f"disk {' and '.join(dict.fromkeys(disk))}, computation {compute}"

    @property
    def assumptions(self) -> dict[str, str]:
        """Each number with its source, for the foot of a report."""
        read, write, mixed, compute = self._origins
        assumptions = {
            "read bandwidth": f"{_shown(self.read)} ({read})",
            "write bandwidth": f"{_shown(self.write)} ({write})",
            "mixed bandwidth": "read and write in turn"
            if self.mixed is None
            else f"{_shown(self.mixed)} ({mixed})",
            "computation": f"{format_seconds(self.compute_s)} a step ({compute})",
            "overlap": {
                Overlap.LOOKAHEAD: "a pass is fetched while the previous pass computes",
                Overlap.SERIAL: "none: a pass is fetched when it is needed",
            }[self.overlap],
            "endurance": f"{_decimal(self._endurance)} written ({_origin(self.endurance_bytes)})",
            "drive": f"{_decimal(self._drive)} ({_origin(self.drive_bytes)})",
        }
        if self.steps_per_s is not None:
            assumptions["speed"] = f"{self.steps_per_s:g} steps/s (given)"
        return assumptions

    @property
    def _endurance(self) -> float:
        return self.endurance_bytes or _ASSUMED_ENDURANCE

    @property
    def _drive(self) -> float:
        return self.drive_bytes or _ASSUMED_DRIVE

    def stalls(self, requests: Requests, replayed: Replayed) -> NDArray[np.float64]:
        """Seconds that each event waits [events]; 0 in the warm-up."""
        reads, read = replayed.event_reads, replayed.event_read_bytes
        writes, written = replayed.event_writes, replayed.event_written_bytes
        fetch = _seconds(self.read, reads, read) + _seconds(self.write, writes, written)
        if self.mixed is not None:
            both = _seconds(self.mixed, reads + writes, read + written)
            fetch = np.where((reads > 0) & (writes > 0), both, fetch)
        if self.overlap is Overlap.SERIAL:
            return fetch
        weights = np.where(requests.phases == Phase.BACKWARD.value, _BACKWARD_WEIGHT, 1.0)
        totals = np.bincount(requests.steps, weights=weights, minlength=requests.step_count)
        compute = self.compute_s * weights / totals[requests.steps]
        return np.maximum(0.0, fetch - np.concatenate(([0.0], compute[:-1])))

    def wear(self, outcome: Outcome, stall_s: float) -> tuple[float, float]:
        """Drive writes a day, and years of drive life, of steps that stall for ``stall_s``."""
        step_s = 1 / self.steps_per_s if self.steps_per_s else self.compute_s + stall_s
        written_per_s = outcome.written_per_step / step_s if step_s > 0 else 0.0
        life = drive_life_s(self._endurance, written_per_s, 1.0) / _YEAR_S
        return written_per_s * DAY_S / self._drive, life


def _seconds(each: Cost, entries: NDArray[np.uint32], nbytes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Seconds for ``entries`` transfers of ``nbytes`` in all [events]."""
    return each.latency_s * entries + nbytes / each.per_s


def _origin(given: float | None) -> str:
    return Evidence.ASSUMED.value if given is None else _GIVEN


def _predicted_compute_s(config: TrainConfig, profile: Profile) -> float:
    """Computing time of one rank's step in seconds, as ``tierstore plan`` predicts it."""
    from tierstore.plan.capacity import Setting
    from tierstore.plan.predict import predict
    from tierstore.prefetch.operations import Resource

    expert = config.parallel.expert
    planned = Setting(
        config=config,
        model=config.model.architecture,
        ranks=max(expert, 1),
        expert=expert,
        process_bytes=profile.process_bytes,
        process_evidence=profile.evidence,
    )
    found = predict(planned, profile)
    return found.step_s * found.busy_ratio[Resource.COMPUTE]


def with_costs(requests: Requests, replayed: Replayed, machine: Machine) -> Outcome:
    """The outcome of ``replayed`` with stall a step, drive writes per day and drive life on ``machine``."""
    outcome = replayed.outcome
    stall = float(machine.stalls(requests, replayed).sum()) / max(outcome.steps, 1)
    writes, life = machine.wear(outcome, stall)
    return replace(outcome, stall_s_per_step=stall, drive_writes_per_day=writes, drive_life_years=life)


def cost_by_step(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """The cost that ``objective`` counts, by step [steps]: misses, bytes, or seconds."""
    if objective is Objective.MISSES:
        return replayed.step_misses.astype(np.float64)
    costs = _cost_by_event(requests, replayed, objective, machine)
    return np.bincount(requests.steps, weights=costs, minlength=requests.step_count).astype(np.float64)


def cost_by_layer(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """The cost that ``objective`` counts, by layer [layers], of a replay with layer scope."""
    if objective is Objective.MISSES:
        return replayed.layer_misses.astype(np.float64)
    costs = _cost_by_event(requests, replayed, objective, machine)
    return np.bincount(requests.layers, weights=costs, minlength=requests.table.layer_count).astype(
        np.float64
    )


def _cost_by_event(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    if objective is Objective.STALL:
        return machine.stalls(requests, replayed)
    return replayed.event_read_bytes.astype(np.float64) + replayed.event_written_bytes


def policy_time(
    requests: Requests, settings: Sequence[ReplaySetting], *, repeats: int = 3
) -> list[list[float]]:
    """CPU seconds per request of each setting in each of ``repeats`` replays; the settings take turns on one thread."""
    rounds = [
        [replay_one(requests, setting, 0, Detail.STEPS).outcome.policy_s or 0.0 for setting in settings]
        for _ in range(repeats)
    ]
    count = max(len(requests.entries), 1)
    return [[spent / count for spent in times] for times in zip(*rounds, strict=True)]


def _shown(cost: Cost) -> str:
    """``3 GB/s``, or with a latency ``100 us and 3 GB/s``."""
    rate = f"{_decimal(cost.per_s)}/s" if math.isfinite(cost.per_s) else "no time for bytes"
    return f"{format_seconds(cost.latency_s)} an entry and {rate}" if cost.latency_s else rate


def _decimal(count: float) -> str:
    """Bytes in powers of ten, as drives are sold: ``3 GB``, ``600 TB``."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g} B"
