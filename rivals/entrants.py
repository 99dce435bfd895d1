"""What both races share: who may take part, who does, what became of them, and whose turn it is."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from process import RivalProcess

from tierstore.bench.probes import MemoryLimit
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
