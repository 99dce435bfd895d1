"""What misses cost: stalls, drive writes, drive life. From a stated machine, hence estimated.

The time of one layer pass (one event) on the tier below is

    fetch = read bytes / read bandwidth + written bytes / write bandwidth

or, where a bandwidth of mixed traffic is given and the pass both reads and writes, all bytes over that. The
computation of a step is split over its passes, a backward pass counting twice a forward one. The wait of a
pass is

    serial:        fetch                              (what is needed is asked for when it is needed)
    lookahead 1:   max(0, fetch - compute before it)  (fetched while the pass before it computes)

The first pass of a trace has nothing before it. A policy's own time is measured, not modelled:
``Outcome.policy_s`` is CPU time of the replay, which ``policy_time`` repeats.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tierstore.cache.access import Phase
from tierstore.endurance import DAY_S, drive_life_s
from tierstore.errors import ConfigError
from tierstore.lab.requests import Requests
from tierstore.lab.results import Outcome
from tierstore.lab.simulate import Detail, Replayed, Setting, replay_all
from tierstore.units import format_seconds

__all__ = ["Machine", "Objective", "Overlap", "cost_by_layer", "cost_by_step", "policy_time", "with_costs"]

_YEAR_S = 365.25 * DAY_S
_BACKWARD_WEIGHT = 2.0


class Overlap(enum.Enum):
    """Whether a pass is fetched while the one before it computes."""

    LOOKAHEAD = "lookahead"
    SERIAL = "serial"


class Objective(enum.Enum):
    """What a choice is to make small."""

    MISSES = "misses"
    BYTES = "bytes"  # read and written
    STALL = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What estimates rest on. Bandwidths in bytes/s, endurance and drive size in bytes, times in seconds."""

    read_bytes_per_s: float = 3e9
    write_bytes_per_s: float = 2e9
    mixed_bytes_per_s: float | None = None
    compute_s_per_step: float = 0.0
    overlap: Overlap = Overlap.LOOKAHEAD
    endurance_bytes: float | None = 600e12  # that the maker warrants to be written (TBW)
    drive_bytes: float | None = 1e12
    steps_per_s: float | None = None  # None: from computation and stalls

    def __post_init__(self) -> None:
        for name in ("read_bytes_per_s", "write_bytes_per_s", "mixed_bytes_per_s", "endurance_bytes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: expected more than 0, got {value}")
        for name in ("drive_bytes", "steps_per_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name}: expected more than 0, got {value}")
        if not (math.isfinite(self.compute_s_per_step) and self.compute_s_per_step >= 0):
            raise ConfigError(f"compute_s_per_step: expected at least 0, got {self.compute_s_per_step}")

    @property
    def assumptions(self) -> dict[str, str]:
        """For a report's foot."""
        mixed = self.mixed_bytes_per_s
        said = {
            "read bandwidth": f"{_decimal(self.read_bytes_per_s)}/s",
            "write bandwidth": f"{_decimal(self.write_bytes_per_s)}/s",
            "mixed bandwidth": "read and write in turn" if mixed is None else f"{_decimal(mixed)}/s",
            "computation": f"{format_seconds(self.compute_s_per_step)} a step",
            "overlap": {
                Overlap.LOOKAHEAD: "a pass is fetched while the one before it computes",
                Overlap.SERIAL: "none: a pass is fetched when it is needed",
            }[self.overlap],
        }
        if self.endurance_bytes is not None:
            said["endurance"] = f"{_decimal(self.endurance_bytes)} written"
        if self.drive_bytes is not None:
            said["drive"] = _decimal(self.drive_bytes)
        if self.steps_per_s is not None:
            said["speed"] = f"{self.steps_per_s:g} steps/s"
        return said

    def stalls(self, requests: Requests, replayed: Replayed) -> NDArray[np.float64]:
        """Seconds that each event waits [events]; 0 in the warm-up."""
        read = replayed.event_read_bytes.astype(np.float64)
        written = replayed.event_written_bytes.astype(np.float64)
        fetch = read / self.read_bytes_per_s + written / self.write_bytes_per_s
        if self.mixed_bytes_per_s is not None:
            fetch = np.where((read > 0) & (written > 0), (read + written) / self.mixed_bytes_per_s, fetch)
        if self.overlap is Overlap.LOOKAHEAD:
            before = np.concatenate(([0.0], self._compute(requests)[:-1]))
            fetch = np.maximum(0.0, fetch - before)
        return fetch

    def _compute(self, requests: Requests) -> NDArray[np.float64]:
        """Seconds that each event computes [events]."""
        weights = np.where(requests.phases == Phase.BACKWARD.value, _BACKWARD_WEIGHT, 1.0)
        totals = np.bincount(requests.steps, weights=weights, minlength=requests.step_count)
        return self.compute_s_per_step * weights / totals[requests.steps]


def with_costs(requests: Requests, replayed: Replayed, outcome: Outcome, machine: Machine) -> Outcome:
    """``outcome`` with the stall a step, drive writes per day and drive life that ``machine`` would see."""
    steps = max(outcome.steps, 1)
    stall = float(machine.stalls(requests, replayed).sum()) / steps
    step_s = 1 / machine.steps_per_s if machine.steps_per_s else machine.compute_s_per_step + stall
    written_per_s = outcome.written_bytes / steps / step_s if step_s > 0 else 0.0
    writes = life = None
    if machine.drive_bytes is not None:
        writes = written_per_s * DAY_S / machine.drive_bytes
    if machine.endurance_bytes is not None:
        life = drive_life_s(machine.endurance_bytes, written_per_s, 1.0) / _YEAR_S
    return replace(outcome, stall_s_per_step=stall, drive_writes_per_day=writes, drive_life_years=life)


def cost_by_step(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """What ``objective`` counts, by step [steps]: misses, bytes, or seconds."""
    if objective is Objective.MISSES:
        return replayed.step_misses.astype(np.float64)
    events = _cost_by_event(requests, replayed, objective, machine)
    return np.bincount(requests.steps, weights=events, minlength=requests.step_count).astype(np.float64)


def cost_by_layer(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    """What ``objective`` counts, by layer [layers], of a replay with layer scope."""
    if objective is Objective.MISSES:
        return replayed.layer_misses.astype(np.float64)
    events = _cost_by_event(requests, replayed, objective, machine)
    return np.bincount(requests.layers, weights=events, minlength=requests.layer_count).astype(np.float64)


def _cost_by_event(
    requests: Requests, replayed: Replayed, objective: Objective, machine: Machine
) -> NDArray[np.float64]:
    if objective is Objective.STALL:
        return machine.stalls(requests, replayed)
    return replayed.event_read_bytes.astype(np.float64) + replayed.event_written_bytes


def policy_time(requests: Requests, settings: Sequence[Setting], *, repeats: int = 3) -> list[list[float]]:
    """CPU seconds per request of each setting, in each of ``repeats`` replays: one thread, in turns."""
    rounds = [
        [replayed.policy_s for replayed in replay_all(requests, settings, detail=Detail.STEPS, threads=1)]
        for _ in range(repeats)
    ]
    count = max(len(requests.entries), 1)
    return [[spent / count for spent in times] for times in zip(*rounds, strict=True)]


def _decimal(count: float) -> str:
    """Bytes as makers of drives count them: ``3 GB``, ``600 TB``."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:.4g} B"
