"""What both races share: who may take part, who does, what became of them, and whose turn it is."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from process import RivalProcess

from tierstore.bench.probes import MemoryLimit
from tierstore.bench.train_bound import Compulsory, bound_s
from tierstore.errors import CapabilityError, ConfigError

#: The rival whose ratios to the others are shown, and the one with everything in RAM that bounds it.
OURS, OURS_IN_RAM = "tierstore", "tierstore-ram"


class Outcome(Enum):
    """What became of a rival."""

    RAN = "ran"
    SKIPPED = "skipped"  # not installed, or it did not open
    DIED = "died"  # in a turn: it takes no further part
    DISAGREED = "disagreed"  # its losses differ: it trained something else


@dataclass(frozen=True)
class Rival:
    """A rival of a race. ``module``: of this directory; it is imported in the rival's own process. ``needs``: a module that
    must be there, of the ``extra``, or by its own name where no extra has it.
    """

    title: str
    module: str
    needs: str = "torch"
    extra: str = ""

    def missing(self) -> str | None:
        """Why it cannot take part; None if it can."""
        if importlib.util.find_spec(self.needs) is not None:
            return None
        wanted = f"tierstore[{self.extra}]" if self.extra else self.needs
        return f"{self.needs} is not installed (pip install {wanted})"


@dataclass(kw_only=True)
class Entrant:
    """A rival on its way through a race. ``memory``: what limits it. ``turns``: what it answered, by batch size (0 in the
    race of training); ``disk_speeds``: bytes a second of the disk at each of them.
    """

    name: str
    rival: Rival
    process: RivalProcess | None = None
    outcome: Outcome = Outcome.RAN
    reason: str | None = None
    memory: str = "no limit"
    description: Sequence[str] = ()
    open_s: float | None = None
    turns: dict[int, list[Any]] = field(default_factory=dict)
    disk_speeds: dict[int, list[float]] = field(default_factory=dict)

    def leave(self, outcome: Outcome, reason: str) -> None:
        """It takes no further part."""
        self.outcome, self.reason = outcome, reason
        if self.process is not None:
            self.process.close()
            self.process = None

    @property
    def left(self) -> str:
        """Why it left the race; empty while it takes part."""
        return "" if self.reason is None else f"{self.name}: {self.outcome.value}: {self.reason}"

    def facts(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "title": self.rival.title,
            "outcome": self.outcome.value,
            "reason": self.reason,
            "memory": self.memory,
            "description": list(self.description),
        }


def enter(names: Sequence[str], rivals: Mapping[str, Rival]) -> dict[str, Entrant]:
    """The entrants of a race; those that are not installed are skipped. Raises ConfigError."""
    for name in names:
        if name not in rivals:
            raise ConfigError(f"rivals: expected one of {', '.join(rivals)}, got {name}")
    if not names or len({*names}) != len(names):
        raise ConfigError(f"rivals: expected at least one, each once, got {', '.join(names) or 'none'}")
    entrants = {name: Entrant(name=name, rival=rivals[name]) for name in names}
    for entrant in entrants.values():
        if (missing := entrant.rival.missing()) is not None:
            entrant.leave(Outcome.SKIPPED, missing)
    return entrants


def order(names: Sequence[str], number: int) -> list[str]:
    """Whose turns round ``number`` has: each round begins one further."""
    first = number % max(len(names), 1)
    return [*names[first:], *names[:first]]


def memory_group(limit: int, name: str, stack: contextlib.ExitStack) -> MemoryLimit | str:
    """A cgroup of ``limit`` bytes, closed with ``stack``; or why none can be made."""
    try:
        group = MemoryLimit(limit, name=name)
    except CapabilityError as error:
        return str(error)
    stack.callback(group.close)
    return group


def bound_figures(
    least: Compulsory, steps: int, in_ram: Sequence[float], speeds: Sequence[float]
) -> tuple[list[float], dict[str, Any]]:
    """What tierstore's step could take at best, by round: max(the same in RAM, compulsory bytes / bandwidth); and the
    figures of it.

    Compulsory bytes are the least that any of the native policies moves in the ``steps`` of the recorded run with its
    memory; the clairvoyant ones are what knowing the future would move. ``in_ram``: seconds by round, none where
    tierstore-ram did not take part; ``speeds``: of the disk by round.
    """
    moved, clairvoyant = least.least.per(steps), least.clairvoyant.per(steps)
    bounds = [bound_s(in_ram[i] if in_ram else 0.0, moved, speed) for i, speed in enumerate(speeds)]
    return bounds, {
        "compulsory_policy": least.policy,
        "compulsory_step_read_bytes": moved.read,
        "compulsory_step_written_bytes": moved.written,
        "clairvoyant_step_bytes": clairvoyant.total,
        "disk_bytes_per_s": statistics.median(speeds),
        "compulsory_s": statistics.median(moved.total / speed for speed in speeds),
        "in_ram_step_s": statistics.median(in_ram) if in_ram else None,
        "bound_s": statistics.median(bounds),
    }


def rival_notes(entrants: Mapping[str, Entrant]) -> list[str]:
    """Why rivals left, what limited their memory, and what of their configuration matters, for people."""
    notes = []
    for one in entrants.values():
        if one.reason is not None:
            notes.append(f"{one.rival.title}: {one.outcome.value}: {one.reason}")
        if one.memory != "no limit":
            notes.append(f"{one.rival.title}: memory: {one.memory}")
        notes += [f"{one.rival.title}: {line}" for line in one.description]
    return notes
