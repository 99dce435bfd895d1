"""What misses cost: stalls, drive writes, drive life. From a stated machine, hence estimated.

A machine is a profile, as ``tierstore bench machine`` measures it and ``tierstore plan`` predicts from (without one
its assumed figures), and what is given instead. One transfer of that profile is one entry, so that a layer pass
(one event) takes

    fetch = entries read x latency + bytes read / bandwidth + the same of what is written

on the tier below or, where the pass both reads and writes and a line of mixed traffic is known, all bytes by that.
The computation of a step is given, or predicted by ``plan`` from a run's configuration. It is split over its
passes, a backward pass counting twice a forward one. The wait of a pass is

    serial:        fetch                              (what is needed is asked for when it is needed)
    lookahead 1:   max(0, fetch - compute before it)  (fetched while the pass before it computes)

The first pass of a trace has nothing before it. A policy's own time is measured, not modelled:
``Outcome.policy_s`` is CPU time of the replay, which ``policy_time`` repeats.
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
from tierstore.endurance import DAY_S, drive_life_s
from tierstore.errors import ConfigError
from tierstore.lab.requests import Requests
from tierstore.lab.results import Outcome
from tierstore.lab.simulate import Replayed, ReplaySetting, replay_one
from tierstore.machine_profile import ASSUMED, Cost, Evidence, Profile
from tierstore.units import format_seconds

if TYPE_CHECKING:  # a run's configuration, where one is asked about
    from tierstore.train.config import TrainConfig

_YEAR_S = 365.25 * DAY_S
_BACKWARD_WEIGHT = 2.0
_ASSUMED_ENDURANCE, _ASSUMED_DRIVE = 600e12, 1e12
_GIVEN = "given"


class Overlap(enum.Enum):
    """Whether a pass is fetched while the one before it computes."""

    LOOKAHEAD = "lookahead"
    SERIAL = "serial"


class Objective(enum.Enum):
    """What a choice is to make small."""

    MISSES = "misses"
    BYTES = "bytes"  # read and written
    STALL = "stall"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What estimates rest on. Bandwidths in bytes/s, endurance and drive size in bytes, times in seconds.

    What is None is the profile's, or assumed. A bandwidth that is given has no latency; where one of reads or writes
    is given and none of mixed traffic, a pass reads and writes in turn. ``run`` is the configuration whose
    computation ``plan`` predicts. Raises ConfigError for numbers that cannot be, BudgetError for a run that cannot.
    """

    profile: Profile = ASSUMED
    run: TrainConfig | None = None
    read_bytes_per_s: float | None = None
    write_bytes_per_s: float | None = None
    mixed_bytes_per_s: float | None = None
    compute_s_per_step: float | None = None  # None: that of ``run``, or 0
    overlap: Overlap = Overlap.LOOKAHEAD
    endurance_bytes: float | None = None  # that the maker warrants to be written (TBW)
    drive_bytes: float | None = None
    steps_per_s: float | None = None  # None: from computation and stalls
    compute_s: float = field(init=False)  # of a step, wherever it comes from

    def __post_init__(self) -> None:
        for name in (
            *("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s"),
            *("endurance_bytes", "drive_bytes", "steps_per_s"),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: expected more than 0, got {value}")
        compute = self.compute_s_per_step
        if compute is not None and not (math.isfinite(compute) and compute >= 0):
            raise ConfigError(f"compute_s_per_step: expected at least 0, got {compute}")
        if compute is None:
            compute = 0.0 if self.run is None else _predicted_compute_s(self.run, self.profile)
        object.__setattr__(self, "compute_s", compute)

    @property
    def read(self) -> Cost:
        """Of an entry that is read."""
        return _line(self.read_bytes_per_s) or self.profile.disk_read

    @property
    def write(self) -> Cost:
        """Of an entry that is written."""
        return _line(self.write_bytes_per_s) or self.profile.disk_write

    @property
    def mixed(self) -> Cost | None:
        """Of an entry of mixed traffic; None: as many reads and writes in turn."""
        in_turn = self.read_bytes_per_s is not None or self.write_bytes_per_s is not None
        return _line(self.mixed_bytes_per_s) or (None if in_turn else self.profile.disk_mixed)

    @property
    def source(self) -> str:
        """Where the numbers come from, in a few words: for the head of a table."""
        return f"disk {_joined(self._disk_origins)}, computation {self._compute_origin}"

    @property
    def assumptions(self) -> dict[str, str]:
        """For a report's foot: each number, and where it comes from."""
        read, write, mixed = self._disk_origins
        said = {
            "read bandwidth": f"{_shown(self.read)} ({read})",
            "write bandwidth": f"{_shown(self.write)} ({write})",
            "mixed bandwidth": "read and write in turn"
            if self.mixed is None
            else f"{_shown(self.mixed)} ({mixed})",
            "computation": f"{format_seconds(self.compute_s)} a step ({self._compute_origin})",
            "overlap": {
                Overlap.LOOKAHEAD: "a pass is fetched while the one before it computes",
                Overlap.SERIAL: "none: a pass is fetched when it is needed",
            }[self.overlap],
            "endurance": f"{_decimal(self._endurance)} written ({_origin(self.endurance_bytes)})",
            "drive": f"{_decimal(self._drive)} ({_origin(self.drive_bytes)})",
        }
        if self.steps_per_s is not None:
            said["speed"] = f"{self.steps_per_s:g} steps/s (given)"
        return said

    @property
    def _profile_origin(self) -> str:
        profile = self.profile
        measured = profile.evidence is Evidence.MEASURED
        return f"measured profile: {profile.machine}" if measured else Evidence.ASSUMED.value

    @property
    def _disk_origins(self) -> tuple[str, str, str]:
        """Of reads, writes and mixed traffic."""
        given = (self.read_bytes_per_s, self.write_bytes_per_s, self.mixed_bytes_per_s)
        read, write, mixed = (self._profile_origin if one is None else _GIVEN for one in given)
        return read, write, mixed

    @property
    def _compute_origin(self) -> str:
        if self.compute_s_per_step is not None:
            return _GIVEN
        if self.run is None:
            return Evidence.ASSUMED.value
        return f"predicted by plan, {self._profile_origin}"

    @property
    def _endurance(self) -> float:
        return _ASSUMED_ENDURANCE if self.endurance_bytes is None else self.endurance_bytes

    @property
    def _drive(self) -> float:
        return _ASSUMED_DRIVE if self.drive_bytes is None else self.drive_bytes

    def stalls(self, requests: Requests, replayed: Replayed) -> NDArray[np.float64]:
        """Seconds that each event waits [events]; 0 in the warm-up."""
        reads, read = replayed.event_reads, replayed.event_read_bytes
        writes, written = replayed.event_writes, replayed.event_written_bytes
        fetch = _seconds(self.read, reads, read) + _seconds(self.write, writes, written)
        if self.mixed is not None:
            both = _seconds(self.mixed, reads + writes, read + written)
            fetch = np.where((reads > 0) & (writes > 0), both, fetch)
        if self.overlap is Overlap.LOOKAHEAD:
            before = np.concatenate(([0.0], self._compute(requests)[:-1]))
            fetch = np.maximum(0.0, fetch - before)
        return fetch

    def _compute(self, requests: Requests) -> NDArray[np.float64]:
        """Seconds that each event computes [events]."""
        weights = np.where(requests.phases == Phase.BACKWARD.value, _BACKWARD_WEIGHT, 1.0)
        totals = np.bincount(requests.steps, weights=weights, minlength=requests.step_count)
        return self.compute_s * weights / totals[requests.steps]

    def wear(self, outcome: Outcome, stall_s: float) -> tuple[float, float]:
        """Drive writes a day, and years of drive life, of steps that stall for ``stall_s``."""
        step_s = 1 / self.steps_per_s if self.steps_per_s else self.compute_s + stall_s
        written_per_s = outcome.written_per_step / step_s if step_s > 0 else 0.0
        life = drive_life_s(self._endurance, written_per_s, 1.0) / _YEAR_S
        return written_per_s * DAY_S / self._drive, life


def _seconds(each: Cost, entries: NDArray[np.uint32], nbytes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Of so many transfers of so many bytes in all [events]."""
    return each.latency_s * entries + nbytes / each.per_s


def _line(bytes_per_s: float | None) -> Cost | None:
    return None if bytes_per_s is None else Cost(0.0, bytes_per_s)


def _origin(given: float | None) -> str:
    return Evidence.ASSUMED.value if given is None else _GIVEN


def _joined(origins: Sequence[str]) -> str:
    """Each of them once."""
    return " and ".join(dict.fromkeys(origins))


def _predicted_compute_s(config: TrainConfig, profile: Profile) -> float:
    """What ``tierstore plan`` says that the computation of one rank's step takes."""
    from tierstore.plan.capacity import Ranks, Setting
    from tierstore.plan.predict import predict
    from tierstore.prefetch.operations import Resource

    expert = config.parallel.expert
    planned = Setting(
        config=config,
        model=config.model.architecture,
        ranks=Ranks(count=max(expert, 1), expert=expert),
        process_bytes=profile.process_bytes,
        process_evidence=profile.evidence,
    )
    found = predict(planned, profile)
    return found.step_s * found.busy_ratio[Resource.COMPUTE]


def with_costs(requests: Requests, replayed: Replayed, outcome: Outcome, machine: Machine) -> Outcome:
    """``outcome`` with the stall a step, drive writes per day and drive life that ``machine`` would see."""
    stall = float(machine.stalls(requests, replayed).sum()) / max(outcome.steps, 1)
    writes, life = machine.wear(outcome, stall)
    return replace(outcome, stall_s_per_step=stall, drive_writes_per_day=writes, drive_life_years=life)


def cost_by_step(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """What ``objective`` counts, by step [steps]: misses, bytes, or seconds."""
    if objective is Objective.MISSES:
        return replayed.step_misses.astype(np.float64)
    return _summed(
        requests.steps, requests.step_count, _cost_by_event(requests, replayed, objective, machine)
    )


def cost_by_layer(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """What ``objective`` counts, by layer [layers], of a replay with layer scope."""
    if objective is Objective.MISSES:
        return replayed.layer_misses.astype(np.float64)
    return _summed(
        requests.layers, requests.table.layer_count, _cost_by_event(requests, replayed, objective, machine)
    )


def _summed(group: NDArray[np.uint32], count: int, costs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(group, weights=costs, minlength=count).astype(np.float64)


def _cost_by_event(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    if objective is Objective.STALL:
        return machine.stalls(requests, replayed)
    return replayed.event_read_bytes.astype(np.float64) + replayed.event_written_bytes


def policy_time(
    requests: Requests, settings: Sequence[ReplaySetting], *, repeats: int = 3
) -> list[list[float]]:
    """CPU seconds per request of each setting, in each of ``repeats`` replays: one thread, in turns."""
    rounds = [
        [replay_one(requests, setting, 0, Detail.STEPS).policy_s for setting in settings]
        for _ in range(repeats)
    ]
    count = max(len(requests.entries), 1)
    return [[spent / count for spent in times] for times in zip(*rounds, strict=True)]


def _shown(cost: Cost) -> str:
    """``3 GB/s``, or with a latency ``100 us and 3 GB/s``."""
    rate = f"{_decimal(cost.per_s)}/s" if math.isfinite(cost.per_s) else "no time for bytes"
    return f"{format_seconds(cost.latency_s)} an entry and {rate}" if cost.latency_s else rate


def _decimal(count: float) -> str:
    """Bytes as makers of drives count them: ``3 GB``, ``600 TB``."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g} B"
