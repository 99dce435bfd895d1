"""Where the time went and what was counted: stalls by layer, tier and cause; percentiles.

A *stall* is time in which the calling thread does nothing but wait for a tier. The code that waits charges it::

    if not ticket.done():
        with ledger.stall(layer=3, tier=Tier.NVME, cause=Cause.DEMAND_READ):
            ticket.wait()

so a request that does not wait pays for its own test and nothing here. Stalls nest: the inner one's time is taken out of
the outer one, so that the charges add up to the time stalled and no moment counts twice.

Not thread-safe: callers must be serialised; the ledger holds no lock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias, TypeVar

K = TypeVar("K")
#: Called with the amount done and the total amount.
OnProgress: TypeAlias = Callable[[int, int], None]


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""


def in_parts(progress: OnProgress, count: int) -> Iterator[OnProgress]:
    """The progress of each of ``count`` passes in turn, as parts of one; those that have not begun (stores of other ranks,
    say) count as much as the current one.
    """
    before, size, left = 0, 0, count

    def part(done: int, total: int) -> None:
        nonlocal size
        size = total
        progress(before + done, before + left * total)

    while left:
        yield part
        before, left = before + size, left - 1


class Dimension(Enum):
    """Where the awaited data was to come from: other ranks, or the tiers of this one."""

    HORIZONTAL = "horizontal"
    VERTICAL = "vertical"


class Tier(Enum):
    """What was waited for."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"
    RANKS = "ranks"  # what the other ranks hold, or have computed

    @property
    def dimension(self) -> Dimension:
        return Dimension.HORIZONTAL if self is Tier.RANKS else Dimension.VERTICAL


class Cause(Enum):
    """Why it was waited for."""

    DEMAND_READ = "demand read"  # it was not requested before it was needed
    LATE_PREFETCH = "late prefetch"  # it was in flight, but not there yet
    OPTIMIZER = "optimizer"  # its step, or the replay of its missed steps, had not finished
    WRITE_BACK = "write-back"  # its memory was still being written to disk
    GRADIENT_SPILL = "gradient spill"  # gradients that did not fit the budget, written or read back
    BOUNDARY_SPILL = "boundary spill"  # block inputs that did not fit their budget, written or read back
    COPY = "copy"  # a transfer between host and device
    COMPUTING = "computing"  # what the device has yet to compute; not a stall (``accelerator.device_waits``)
    COMMIT = "commit"
    WRITE_BUDGET = "write budget"  # the daily write budget was used up
    DATA = "data"  # the next batch
    GATHER = "gather"  # of a layer's dense parameters
    REDUCE = "reduce-scatter"  # of their gradients
    ALL_TO_ALL = "all-to-all"  # of tokens, to their experts and back
    ALL_REDUCE = "all-reduce"  # of the partial results of tensor-parallel ranks
    PIPELINE = "pipeline"  # what the previous or next stage has yet to send
    AGREEMENT = "agreement"  # on losses, norms and commits


@dataclass(frozen=True, slots=True)
class StallKey:
    """What a stall is charged to. ``layer`` is None outside any layer (a commit, the data)."""

    layer: int | None
    tier: Tier
    cause: Cause


@dataclass(frozen=True, slots=True)
class Stall:
    """The total charged to one key: nanoseconds, and how many intervals they were."""

    key: StallKey
    stall_ns: int
    intervals: int

    def as_dict(self) -> dict[str, object]:
        """The row as JSON shows it, with seconds."""
        return {
            "layer": self.key.layer,
            "dimension": self.key.tier.dimension.value,
            "tier": self.key.tier.value,
            "cause": self.key.cause.value,
            "stall_s": self.stall_ns / 1e9,
            "intervals": self.intervals,
        }


class StallLedger:
    """Charges stalled intervals. ``listener``, if any, is called with each, its start and its end (for a timeline).

    ``clock`` gives nanoseconds and never goes back; the default is the native engine's (CLOCK_MONOTONIC).
    """

    def __init__(
        self,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        listener: Callable[[StallKey, int, int], None] | None = None,
    ) -> None:
        self._clock = clock
        self._listener = listener
        self._charges: dict[StallKey, list[int]] = {}
        self._diverted: tuple[Cause, Callable[[], int]] | None = None
        self._open: list[_OpenStall] = []
        self._watchers: tuple[Callable[[], None], Callable[[], None]] | None = None

    def stall(self, *, layer: int | None, tier: Tier, cause: Cause) -> _OpenStall:
        """A context manager that charges the time inside it, also when it raises."""
        return _OpenStall(self, StallKey(layer, tier, cause))

    def divert(self, cause: Cause, spent_ns: Callable[[], int]) -> None:
        """From now on, charge what ``spent_ns`` (non-decreasing) grows by during a stall to ``cause`` instead."""
        self._diverted = cause, spent_ns

    def watch(self, begun: Callable[[], None], ended: Callable[[], None]) -> None:
        """From now on, call ``begun`` when the caller begins to stall and ``ended`` when it continues; nested stalls count
        as one.
        """
        self._watchers = begun, ended

    def charge(self, key: StallKey, stall_ns: int) -> None:
        """Add one interval that was measured elsewhere. Raises ValueError if it is negative."""
        if stall_ns < 0:
            raise ValueError(f"a stall of {stall_ns} ns")
        entry = self._charges.setdefault(key, [0, 0])
        entry[0] += stall_ns
        entry[1] += 1

    def rows(self) -> list[Stall]:
        """The charges, longest first; ties by layer, tier and cause."""
        stalls = [Stall(key, entry[0], entry[1]) for key, entry in self._charges.items()]
        return sorted(stalls, key=_rank)

    def totals(self, by: Callable[[StallKey], K]) -> dict[K, int]:
        """Nanoseconds grouped by part of the key: ``ledger.totals(lambda key: key.cause)``."""
        sums: dict[K, int] = {}
        for key, entry in self._charges.items():
            sums[by(key)] = sums.get(by(key), 0) + entry[0]
        return sums

    @property
    def total_ns(self) -> int:
        """All nanoseconds charged; a stall that is still open is not included."""
        return sum(entry[0] for entry in self._charges.values())

    @property
    def total_s(self) -> float:
        """All seconds charged."""
        return self.total_ns / 1e9

    def _enter(self, stall: _OpenStall) -> None:
        if self._watchers is not None and not self._open:
            self._watchers[0]()
        now = self._clock()
        if self._open:
            self._open[-1].pause(now)
        stall.resume(now)
        self._open.append(stall)

    def _diverted_ns(self) -> int:
        return 0 if self._diverted is None else self._diverted[1]()

    def _leave(self, stall: _OpenStall) -> None:
        now = self._clock()
        if not self._open or self._open.pop() is not stall:
            raise RuntimeError("stalls were not left in the reverse order of entering")
        stall.pause(now)
        diverted_ns = min(stall.diverted_ns, stall.spent_ns)
        self.charge(stall.key, stall.spent_ns - diverted_ns)
        if self._diverted is not None and diverted_ns:
            self.charge(replace(stall.key, cause=self._diverted[0]), diverted_ns)
        if self._listener is not None:
            self._listener(stall.key, stall.first_ns, now)
        if self._open:
            self._open[-1].resume(now)
        elif self._watchers is not None:
            self._watchers[1]()


class _OpenStall:
    """One interval being measured; paused while a nested one is open."""

    __slots__ = ("_diverted_since_ns", "_ledger", "_since_ns", "diverted_ns", "first_ns", "key", "spent_ns")

    def __init__(self, ledger: StallLedger, key: StallKey) -> None:
        self._ledger = ledger
        self.key = key
        self.first_ns = -1
        self.spent_ns = 0
        self.diverted_ns = 0
        self._since_ns = self._diverted_since_ns = 0

    def resume(self, now: int) -> None:
        if self.first_ns < 0:
            self.first_ns = now
        self._since_ns = now
        self._diverted_since_ns = self._ledger._diverted_ns()

    def pause(self, now: int) -> None:
        self.spent_ns += now - self._since_ns
        self.diverted_ns += self._ledger._diverted_ns() - self._diverted_since_ns

    def __enter__(self) -> None:
        self._ledger._enter(self)

    def __exit__(self, *raised: object) -> None:
        self._ledger._leave(self)


def _rank(stall: Stall) -> tuple[int, int, str, str]:
    layer = -1 if stall.key.layer is None else stall.key.layer
    return (-stall.stall_ns, layer, stall.key.tier.value, stall.key.cause.value)


def delta(earlier: Mapping[str, int], later: Mapping[str, int]) -> dict[str, int]:
    """``later - earlier``, name by name. A name missing in ``earlier`` counts from 0."""
    return {name: count - earlier.get(name, 0) for name, count in later.items()}


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile (0..100) by linear interpolation, as numpy's default has it.

    Raises ValueError for no values or a percent out of range.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    # Equal neighbours are returned unchanged: interpolation could round away from both.
    if ordered[below] == ordered[above]:
        return float(ordered[below])
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample's size, median, 10th and 90th percentile, least and greatest, in the sample's unit."""

    count: int
    median: float
    p10: float
    p90: float
    least: float
    greatest: float


def spread(values: Sequence[float]) -> Spread:
    """The Spread of ``values``. Raises ValueError for none."""
    return Spread(
        count=len(values),
        median=percentile(values, 50),
        p10=percentile(values, 10),
        p90=percentile(values, 90),
        least=percentile(values, 0),
        greatest=percentile(values, 100),
    )


def median_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the Theil-Sen line through points of at least two different ``x``: the medians of all slopes,
    then of all intercepts.
    """
    import itertools
    import statistics  # imports decimal, which most users do not need

    pairs = itertools.combinations(range(len(x)), 2)
    slope = statistics.median((y[j] - y[i]) / (x[j] - x[i]) for i, j in pairs)
    return slope, statistics.median(b - slope * a for a, b in zip(x, y, strict=True))
