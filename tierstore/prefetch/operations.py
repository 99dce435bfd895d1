"""A schedule as a graph of operations, for simulation: which resource each operation occupies, and what it follows.

``operations`` lists what the trainer does with a schedule. The main thread computes, and issues the work of the queues as
it goes. So an operation follows those that it needs and the last computation before it was issued; lookahead and budgets
take effect through the latter. Computation and collectives run in the order of the list.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tierstore.cache.access import Phase
from tierstore.prefetch.plan import StepTiming
from tierstore.prefetch.schedule import Pass, Schedule, StickyGathers, Window


class Resource(Enum):
    """A resource, which carries out one operation at a time. ``HOST``: the engine's compute threads."""

    COMPUTE = "compute"
    GATHER = "gather"
    COPY = "copy"
    DISK = "disk"
    HOST = "host"


class Kind(Enum):
    GATHER = "gather"
    REDUCE = "reduce-scatter"
    DISPATCH = "dispatch"  # sends a chunk's rows to their experts
    COMBINE = "combine"  # sends a chunk's results back
    ALL_TO_ALL = "all-to-all"  # sends rows of a divided table
    DENSE = "dense"  # computation of a pass outside its experts
    EXPERT = "expert"  # computation of one expert
    STEP = "optimizer step"  # of a unit's slice
    FETCH = "fetch"
    LOAD = "load"
    COPY_TO_HOST = "copy to the host"
    EXPERT_STEP = "expert step"
    WRITE = "write-back"


class StepPasses(Enum):
    """Which passes a step has."""

    TRAINING = "training"
    FORWARD = "forward"


_RESOURCES = {
    Kind.GATHER: Resource.GATHER,
    Kind.REDUCE: Resource.GATHER,
    Kind.DISPATCH: Resource.GATHER,
    Kind.COMBINE: Resource.GATHER,
    Kind.ALL_TO_ALL: Resource.GATHER,
    Kind.DENSE: Resource.COMPUTE,
    Kind.EXPERT: Resource.COMPUTE,
    Kind.STEP: Resource.COMPUTE,
    Kind.FETCH: Resource.DISK,
    Kind.LOAD: Resource.COPY,
    Kind.COPY_TO_HOST: Resource.COPY,
    Kind.EXPERT_STEP: Resource.HOST,
    Kind.WRITE: Resource.DISK,
}


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """Bytes that one pass moves on one rank. ``experts``: the number of experts, computed one after another.

    Per expert, 0 for none: ``fetch`` (of weights, read from disk), ``fetch_state`` (of state that only its step needs),
    ``evict``, ``load`` and ``to_host``. ``fetch``, ``fetch_state`` and ``evict`` are means: hits need no fetch, and an
    eviction writes only changed content. ``dispatch`` and ``combine`` are sent in ``chunks`` parts, each for its part of the
    experts. ``rows``: sent by the pass over embedding or head if its rows are divided over ranks. ``spilled``: input of a
    block without experts, written to disk by its forward pass and read back for its backward pass.
    """

    gather: int = 0
    reduce: int = 0
    dispatch: int = 0
    combine: int = 0
    chunks: int = 1
    rows: int = 0
    spilled: int = 0
    experts: int = 0
    fetch: int = 0
    fetch_state: int = 0
    evict: int = 0
    load: int = 0
    to_host: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation for the pass at ``position``, which counts on from step to step. ``after``: indices of the earlier
    operations that it follows. ``due``: the position of the pass that needs it, if it may wait until there is nothing more
    urgent, otherwise 0.
    """

    kind: Kind
    position: int
    nbytes: int
    after: tuple[int, ...]
    due: int = 0

    @property
    def resource(self) -> Resource:
        return _RESOURCES[self.kind]


def operations(
    schedule: Schedule,
    sizes: Callable[[Pass], PassSizes],
    *,
    steps: int = 1,
    slots: int = 4,
    gradient_slots: int = 4,
    spare: int = 0,
    passes: StepPasses = StepPasses.TRAINING,
) -> list[Operation]:
    """The operations of ``steps`` steps from a cold start. ``slots``, ``gradient_slots``: how many experts, and gradients
    that have not been stepped, are on the device at a time. ``spare``: how many gradients of a step are copied to spare
    buffers.
    """
    return _Writer(schedule, sizes, slots, gradient_slots, spare, passes).write(steps)


def _bounds(size: PassSizes) -> list[int]:
    """The bounds of a pass's chunks, from 0 to its number of experts: chunks are as equal as whole experts allow."""
    chunks = min(size.chunks, size.experts)
    return [size.experts * number // chunks for number in range(chunks + 1)]


def _parts(nbytes: int, bounds: Sequence[int]) -> list[int]:
    """``nbytes`` divided over the chunks in proportion to their experts; empty if ``nbytes`` is 0."""
    ends = [nbytes * bound // bounds[-1] for bound in bounds]
    return [stop - start for start, stop in itertools.pairwise(ends)] if nbytes else []


class _Writer:
    def __init__(
        self,
        schedule: Schedule,
        sizes: Callable[[Pass], PassSizes],
        slots: int,
        gradient_slots: int,
        spare: int,
        passes: StepPasses,
    ) -> None:
        self._schedule = schedule
        self._sizes = sizes
        self._slots = slots
        #: The operations that end the use of each gradient slot, oldest first.
        self._gradients: deque[tuple[int, ...]] = deque([()] * gradient_slots)
        self._window = Window(schedule, training=passes is StepPasses.TRAINING)
        self._operations: list[Operation] = []
        #: The last operations of the main thread, and those when the pass before this one began.
        self._last: tuple[int, ...] = ()
        self._before: tuple[int, ...] = ()
        self._gathered: dict[int, int] = {}
        self._sticky = StickyGathers(schedule.units)
        self._reduced: dict[int, list[int]] = {}
        #: Reads by position, for each expert: those that its load waits for, and those that its step waits for.
        self._fetched: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        #: Bytes and position of passes whose experts are fetched and not computed yet.
        self._outstanding: deque[tuple[int, int]] = deque()
        self._computed: dict[int, int] = {}
        #: The last step of an expert.
        self._stepped: tuple[int, ...] = ()
        #: The number of spare buffers, and how many each step has used.
        self._spare = spare
        self._used: Counter[int] = Counter()
        #: The optimizer steps of gradients in spare buffers, by unit and expert, until a load follows them.
        self._late: dict[tuple[int, int], int] = {}
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

    def _add(self, kind: Kind, position: int, nbytes: int, *after: int, due: int = 0) -> int:
        self._operations.append(Operation(kind, position, nbytes, tuple(dict.fromkeys(after)), due))
        return len(self._operations) - 1

    def _gather(self, position: int, units: tuple[int, ...]) -> None:
        for unit in self._sticky.sent(units):
            item = next(p for p in self._schedule.passes if p.unit == unit)
            self._gathered[unit] = self._add(Kind.GATHER, position, self._sizes(item).gather, *self._last)

    def _compute(self, position: int, item: Pass) -> None:
        size, before, self._before = self._sizes(item), self._before, self._last
        if size.spilled and item.phase is Phase.FORWARD:
            self._add(Kind.WRITE, position, size.spilled, *self._last)
        elif size.spilled:
            self._last = (*self._last, self._add(Kind.FETCH, position, size.spilled, *before))
        self._last = (*self._last, self._gathered[item.unit])
        if size.rows:
            self._last = (self._add(Kind.ALL_TO_ALL, position, size.rows, *self._last),)
        if item.phase is Phase.FORWARD:
            self._last = (self._add(Kind.DENSE, position, 0, *self._last),)
        if item.moe_layer is not None and size.experts:
            self._moe(position, item, size)
        if item.phase is Phase.BACKWARD:
            self._last = (self._add(Kind.DENSE, position, 0, *self._last),)
            reduced = self._add(Kind.REDUCE, position, size.reduce, *self._last)
            self._reduced.setdefault(item.unit, []).append(reduced)

    def _moe(self, position: int, item: Pass, size: PassSizes) -> None:
        begun = self._last
        bounds = _bounds(size)
        # All rows are sent before the first expert is requested.
        arrived = [
            self._add(Kind.DISPATCH, position, nbytes, *begun) for nbytes in _parts(size.dispatch, bounds)
        ]
        self._fetch(position, begun)
        place = self._experts.index(position % len(self._window.passes))
        for ahead in range(1, self._schedule.vertical.depth + 1):
            turn, index = divmod(place + ahead, len(self._experts))
            cycle = position // len(self._window.passes) + turn
            if not self._fetch(cycle * len(self._window.passes) + self._experts[index], begun):
                break
        self._run_experts(position, item, size, begun, dict(zip(bounds, arrived, strict=False)))

    def _fetch(self, position: int, begun: tuple[int, ...]) -> bool:
        """Add the reads of a pass's experts, unless an earlier pass has; returns whether they fit the budget."""
        if position in self._fetched:
            return True
        item = self._window.at(position)
        size = self._sizes(item)
        after, budget = list(begun), self._schedule.vertical.nbytes
        wanted = size.experts * (size.fetch + size.fetch_state)
        while (
            budget is not None
            and self._outstanding
            and sum(nbytes for nbytes, _ in self._outstanding) + wanted > budget
        ):
            _, freed = self._outstanding[0]
            if freed not in self._computed:
                return False  # passes further ahead are not read either; this pass's own turn tries again
            after.append(self._computed[freed])
            self._outstanding.popleft()
        self._outstanding.append((wanted, position))
        self._read(position, size, after)
        return True

    def _read(self, position: int, size: PassSizes, after: Sequence[int]) -> None:
        """Add the reads. Each follows the write-back of what it evicts, which may be the expert that was stepped last."""
        self._fetched[position] = []
        for _ in range(size.experts):
            needs = tuple(after)
            if size.evict:
                needs = (self._add(Kind.WRITE, position, size.evict, *needs, *self._stepped),)
            weights, state = (
                (self._add(Kind.FETCH, position, nbytes, *needs),) if nbytes else ()
                for nbytes in (size.fetch, size.fetch_state)
            )
            self._fetched[position].append((weights, state))

    def _run_experts(
        self, position: int, item: Pass, size: PassSizes, begun: tuple[int, ...], arrived: Mapping[int, int]
    ) -> None:
        """``arrived``: the dispatch of each chunk's rows, by its first expert."""
        if position not in self._fetched:  # it did not fit the budget together with fetches ahead
            self._read(position, size, begun)
        backward = item.phase is Phase.BACKWARD
        computed: list[int] = []
        returning = dict(zip(_bounds(size)[1:], _parts(size.combine, _bounds(size)), strict=False))
        for index, (weights, state) in enumerate(self._fetched[position]):
            free = computed[index - self._slots : index - self._slots + 1] if index >= self._slots else []
            late = [self._late.pop((item.unit, index))] if (item.unit, index) in self._late else []
            load = self._add(Kind.LOAD, position, size.load, *begun, *weights, *free, *late)
            gradient = self._gradients.popleft() if backward else ()
            before = (*(computed[-1:] or self._last), *([arrived[index]] if index in arrived else []))
            computed.append(self._add(Kind.EXPERT, position, 0, *before, load, *gradient))
            if backward:
                self._finish_expert(position, item, index, size, computed[-1], state)
            self._last = (computed[-1],)
            if nbytes := returning.get(index + 1, 0):
                self._last = (self._add(Kind.COMBINE, position, nbytes, computed[-1]),)
        self._computed[position] = computed[-1]

    def _finish_expert(
        self, position: int, item: Pass, index: int, size: PassSizes, computed: int, state: tuple[int, ...]
    ) -> None:
        copied = self._add(Kind.COPY_TO_HOST, position, size.to_host, computed) if size.to_host else computed
        step = position // len(self._window.passes)
        if size.to_host and self._used[step] < self._spare:
            self._used[step] += 1
            due = (step + 1) * len(self._window.passes) + item.unit  # the unit's next forward pass
            self._late[item.unit, index] = self._add(Kind.EXPERT_STEP, position, 0, copied, *state, due=due)
            self._gradients.append((copied,))
            return
        self._stepped = (self._add(Kind.EXPERT_STEP, position, 0, copied, *state),)
        self._gradients.append(self._stepped)

    def _step(self, position: int, item: Pass) -> None:
        self._sticky.step(item.unit)
        units = range(len(self._schedule.units))
        needed = units if self._schedule.timing is StepTiming.DEFERRED else [item.unit]
        reduced = [index for unit in needed for index in self._reduced.get(unit, [])]
        self._last = (self._add(Kind.STEP, position, 0, *self._last, *reduced),)
        if item.unit == self._window.passes[-1].unit:
            self._reduced.clear()
