"""A schedule as a graph of operations, for a simulation: what occupies which resource, after what.

``operations`` writes out what the trainer does with a schedule. The main thread computes, and issues the work
of the queues as it goes; so an operation follows what it needs, and the last thing that was computed before
it was issued, which is where lookahead and budgets come in. Each resource serves its operations in the order
of the list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tierstore.cache.access import Phase
from tierstore.prefetch.plan import GradientPlan
from tierstore.prefetch.schedule import Kept, Pass, Schedule, Window

__all__ = ["Kind", "Operation", "PassSizes", "Resource", "operations"]


class Resource(Enum):
    """What does one thing at a time. ``HOST``: the engine's compute threads."""

    COMPUTE = "compute"
    GATHER = "gather"
    COPY = "copy"
    DISK = "disk"
    HOST = "host"


class Kind(Enum):
    GATHER = "gather"
    REDUCE = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    DENSE = "dense"  # computation of a pass outside its experts
    EXPERT = "expert"  # computation of one expert
    STEP = "optimizer step"  # of a unit's slice
    FETCH = "fetch"
    LOAD = "load"
    LAND = "land"
    EXPERT_STEP = "expert step"
    WRITE = "write-back"


_RESOURCES = {
    Kind.GATHER: Resource.GATHER,
    Kind.REDUCE: Resource.GATHER,
    Kind.ALL_TO_ALL: Resource.GATHER,
    Kind.DENSE: Resource.COMPUTE,
    Kind.EXPERT: Resource.COMPUTE,
    Kind.STEP: Resource.COMPUTE,
    Kind.FETCH: Resource.DISK,
    Kind.LOAD: Resource.COPY,
    Kind.LAND: Resource.COPY,
    Kind.EXPERT_STEP: Resource.HOST,
    Kind.WRITE: Resource.DISK,
}


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Bytes that one pass moves on one rank. ``experts`` of them are computed one after another; ``fetch``, ``load``,
    ``land`` and ``write`` are for each of those, and 0 for none (``fetch``: on average, as hits need none).
    """

    gather: int = 0
    reduce: int = 0
    all_to_all: int = 0
    experts: int = 0
    fetch: int = 0
    load: int = 0
    land: int = 0
    write: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the pass at position ``position`` (counted on from step to step), for which it is issued or
    computed. ``after``: indices of earlier operations.
    """

    kind: Kind
    position: int
    nbytes: int
    after: tuple[int, ...]

    @property
    def resource(self) -> Resource:
        return _RESOURCES[self.kind]


def operations(
    schedule: Schedule, sizes: Callable[[Pass], PassSizes], *, steps: int = 1, slots: int = 4
) -> list[Operation]:
    """What ``steps`` steps from a cold start consist of. ``slots``: experts on the device at a time."""
    return _Writer(schedule, sizes, slots).write(steps)


class _Writer:
    def __init__(self, schedule: Schedule, sizes: Callable[[Pass], PassSizes], slots: int) -> None:
        self._schedule = schedule
        self._sizes = sizes
        self._slots = slots
        self._window = Window(schedule, training=True)
        self._operations: list[Operation] = []
        #: The last thing that the main thread has done.
        self._last: tuple[int, ...] = ()
        self._gathered: dict[int, int] = {}
        self._kept = Kept(schedule.units)
        self._reduced: dict[int, list[int]] = {}
        #: Fetches by position, and of what is fetched and not computed yet: bytes, position.
        self._fetched: dict[int, list[int]] = {}
        self._outstanding: deque[tuple[int, int]] = deque()
        self._computed: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._experts = [i for i, item in enumerate(self._window.passes) if item.moe_layer is not None]

    def write(self, steps: int) -> list[Operation]:
        self._gather(0, self._window.begin().gathers)
        for position in range(steps * len(self._window.passes)):
            item = self._window.at(position)
            if item.phase is Phase.OPTIMIZER:
                self._step(position, item)
            else:
                self._compute(position, item)
            self._gather(position + 1, self._window.leave(position).gathers)
        return self._operations

    def _add(self, kind: Kind, position: int, nbytes: int, *after: int) -> int:
        self._operations.append(Operation(kind, position, nbytes, tuple(dict.fromkeys(after))))
        return len(self._operations) - 1

    def _gather(self, position: int, units: tuple[int, ...]) -> None:
        for unit in self._kept.sent(units):
            item = next(p for p in self._schedule.passes if p.unit == unit)
            self._gathered[unit] = self._add(Kind.GATHER, position, self._sizes(item).gather, *self._last)

    def _compute(self, position: int, item: Pass) -> None:
        size = self._sizes(item)
        self._last = (*self._last, self._gathered[item.unit])
        if item.phase is Phase.FORWARD:
            self._last = (self._add(Kind.DENSE, position, 0, *self._last),)
        if item.moe_layer is not None and size.experts:
            self._moe(position, item, size)
        if item.phase is Phase.BACKWARD:
            self._last = (self._add(Kind.DENSE, position, 0, *self._last),)
            reduced = self._add(Kind.REDUCE, position, size.reduce, *self._last)
            self._reduced.setdefault(item.unit, []).append(reduced)

    def _moe(self, position: int, item: Pass, size: PassSizes) -> None:
        if size.all_to_all:
            self._last = (self._add(Kind.ALL_TO_ALL, position, size.all_to_all, *self._last),)
        begun = self._last
        self._fetch(position, begun)
        place = self._experts.index(position % len(self._window.passes))
        for ahead in range(1, self._schedule.vertical.depth + 1):
            turn, index = divmod(place + ahead, len(self._experts))
            cycle = position // len(self._window.passes) + turn
            if not self._fetch(cycle * len(self._window.passes) + self._experts[index], begun):
                break
        self._run_experts(position, item, size, begun)
        if size.all_to_all:
            self._last = (self._add(Kind.ALL_TO_ALL, position, size.all_to_all, *self._last),)

    def _fetch(self, position: int, begun: tuple[int, ...]) -> bool:
        """The reads of the experts of a pass, unless an earlier one has asked for them; whether they fit."""
        if position in self._fetched:
            return True
        item = self._window.at(position)
        size = self._sizes(item)
        after, budget = list(begun), self._schedule.vertical.nbytes
        layer = self._schedule.units[item.unit].moe_layer
        assert layer is not None
        if layer in self._written:
            after.append(self._written[layer])  # what it reads was written after the last step
        wanted = size.experts * size.fetch
        while budget is not None and self._outstanding and self._held() + wanted > budget:
            _, freed = self._outstanding[0]
            if freed not in self._computed:
                return False  # nothing further ahead is asked for either; its own pass will ask again
            after.append(self._computed[freed])
            self._outstanding.popleft()
        self._outstanding.append((wanted, position))
        reads = range(size.experts if size.fetch else 0)
        self._fetched[position] = [self._add(Kind.FETCH, position, size.fetch, *after) for _ in reads]
        return True

    def _held(self) -> int:
        return sum(nbytes for nbytes, _ in self._outstanding)

    def _run_experts(self, position: int, item: Pass, size: PassSizes, begun: tuple[int, ...]) -> None:
        fetched = self._fetched.get(position)
        if fetched is None:  # it did not fit beside what was fetched ahead
            fetched = [self._add(Kind.FETCH, position, size.fetch, *begun) for _ in range(size.experts)]
            self._fetched[position] = fetched
        computed: list[int] = []
        for index in range(size.experts):
            needs = [fetched[index]] if index < len(fetched) else []
            free = [computed[index - self._slots]] if index >= self._slots else []
            load = self._add(Kind.LOAD, position, size.load, *begun, *needs, *free)
            computed.append(self._add(Kind.EXPERT, position, 0, *(computed[-1:] or self._last), load))
            if item.phase is Phase.BACKWARD:
                self._finish_expert(position, item, size, computed[-1])
        self._last = (computed[-1],)
        self._computed[position] = computed[-1]

    def _finish_expert(self, position: int, item: Pass, size: PassSizes, computed: int) -> None:
        landed = self._add(Kind.LAND, position, size.land, computed) if size.land else computed
        stepped = self._add(Kind.EXPERT_STEP, position, 0, landed)
        if size.write:
            assert item.moe_layer is not None
            self._written[item.moe_layer] = self._add(Kind.WRITE, position, size.write, stepped)

    def _step(self, position: int, item: Pass) -> None:
        self._kept.step(item.unit)
        units = range(len(self._schedule.units))
        needed = units if self._schedule.plan is GradientPlan.DEFERRED else [item.unit]
        reduced = [index for unit in needed for index in self._reduced.get(unit, [])]
        self._last = (self._add(Kind.STEP, position, 0, *self._last, *reduced),)
        if item.unit == self._window.passes[-1].unit:
            self._reduced.clear()
