"""The time of a step and how it is spent: a run's schedule, simulated with a machine's costs.

A discrete-event simulation of the schedule's operations.

Each resource has one server, which processes one operation at a time, without preemption.
Computation and collectives run in program order: one thread computes, and every rank must issue collectives in the same
order. Copies, the disk and the engine's threads serve ready operations, the first ready first.

The step time is that of the steady state: from the end of one step's computation to the end of the next one's. The critical
path is traced back from there: from each operation to the one whose end let it begin, a dependency or the previous operation
on its server. The bottleneck is the resource on which the path spends the most time.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

from tierstore.machine_profile import Evidence, Profile
from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import SETTLED, STEPS, LayerDegrees, StepWorkload, layer_degrees
from tierstore.prefetch.operations import Kind, Operation, Resource
from tierstore.prefetch.schedule import Pass


class Discipline(Enum):
    """The order in which a resource serves its operations."""

    PROGRAM = "program order"
    READY = "first ready"


class Occupying(Protocol):
    """An operation that occupies ``resource`` once the earlier operations with the indices ``after`` have ended."""

    @property
    def resource(self) -> Hashable: ...
    @property
    def after(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Occupying)

DISCIPLINES: Mapping[Hashable, Discipline] = {
    Resource.COMPUTE: Discipline.PROGRAM,
    Resource.GATHER: Discipline.PROGRAM,
    Resource.COPY: Discipline.READY,
    Resource.DISK: Discipline.READY,
    Resource.HOST: Discipline.READY,
}


@dataclass(frozen=True)
class Run(Generic[T]):
    """When each operation began and ended, in seconds, and the index of the operation that it waited for last (-1: none)."""

    operations: Sequence[T]
    begun: Sequence[float]
    ended: Sequence[float]
    cause: Sequence[int]

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the last operation."""
        return max(self.ended, default=0.0)

    def critical_path(self, last: int) -> list[int]:
        """The chain of operations that each waited for the previous one, up to ``last``, in time order."""
        path = []
        while last >= 0:
            path.append(last)
            last = self.cause[last]
        return path[::-1]


def simulate(
    operations: Sequence[T],
    seconds: Callable[[T], float],
    *,
    disciplines: Mapping[Hashable, Discipline] = DISCIPLINES,
) -> Run[T]:
    """Simulate ``operations``: each takes ``seconds`` of the server of its resource, one of ``disciplines``, once the
    operations in its ``after`` have ended. Raises ValueError if an operation depends on a later one.
    """
    return _Simulation(operations, seconds, disciplines).run()


@dataclass
class _Server:
    """The server of a resource. ``queue``: the waiting operations, in service order."""

    discipline: Discipline
    busy: bool = False
    program: list[int] = field(default_factory=list)
    served: int = 0
    queue: list[tuple[float, int]] = field(default_factory=list)
    last_ended: int = -1


class _Simulation(Generic[T]):
    def __init__(
        self,
        operations: Sequence[T],
        seconds: Callable[[T], float],
        disciplines: Mapping[Hashable, Discipline],
    ) -> None:
        self._operations = operations
        self._seconds = seconds
        self._servers = {resource: _Server(each) for resource, each in disciplines.items()}
        self._followers: list[list[int]] = [[] for _ in operations]
        self._missing = [len(operation.after) for operation in operations]
        self._begun = [0.0] * len(operations)
        self._ended = [0.0] * len(operations)
        self._cause = [-1] * len(operations)
        self._ready_at: list[float | None] = [None] * len(operations)
        #: A heap of running operations by end time.
        self._running: list[tuple[float, int]] = []
        for index, operation in enumerate(operations):
            self._servers[operation.resource].program.append(index)
            for before in operation.after:
                if not 0 <= before < index:
                    raise ValueError(f"operation {index} depends on {before}, which does not come before it")
                self._followers[before].append(index)

    def run(self) -> Run[T]:
        for index, missing in enumerate(self._missing):
            if missing == 0:
                self._make_ready(index, 0.0, -1)
        self._dispatch(0.0)
        while self._running:
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._end(heapq.heappop(self._running)[1], now)
            self._dispatch(now)
        return Run(self._operations, self._begun, self._ended, self._cause)

    def _make_ready(self, index: int, now: float, cause: int) -> None:
        self._ready_at[index] = now
        self._cause[index] = cause
        server = self._servers[self._operations[index].resource]
        if server.discipline is Discipline.READY:
            heapq.heappush(server.queue, (now, index))

    def _end(self, index: int, now: float) -> None:
        server = self._servers[self._operations[index].resource]
        server.busy = False
        server.last_ended = index
        for follower in self._followers[index]:
            self._missing[follower] -= 1
            if self._missing[follower] == 0:
                self._make_ready(follower, now, index)

    def _dispatch(self, now: float) -> None:
        for server in self._servers.values():
            if not server.busy and (index := self._next(server)) is not None:
                server.busy = True
                ready = self._ready_at[index]
                if ready is not None and ready < now:  # it waited for its server
                    self._cause[index] = server.last_ended
                self._begun[index] = now
                self._ended[index] = now + self._seconds(self._operations[index])
                heapq.heappush(self._running, (self._ended[index], index))

    def _next(self, server: _Server) -> int | None:
        if server.discipline is Discipline.READY:
            return heapq.heappop(server.queue)[1] if server.queue else None
        if server.served == len(server.program) or self._ready_at[server.program[server.served]] is None:
            return None
        server.served += 1
        return server.program[server.served - 1]


@dataclass(frozen=True)
class SteadyState:
    """The steady state. ``busy_ratio``: by resource. ``path_s``: seconds of one step's critical path by kind of operation,
    without waiting. ``bottleneck``: the resource with the largest share of the path.
    """

    step_s: float
    busy_ratio: Mapping[Resource, float]
    path_s: Mapping[Kind, float]
    bottleneck: Resource


def outcome(run: Run[Operation], passes: int, *, steps: int, settled: int = 1) -> SteadyState:
    """The steady state of ``run`` (``steps`` steps of ``passes`` passes each), without its first ``settled`` steps."""
    ends = _step_ends(run, passes, steps)
    first, last = ends[settled - 1] if settled else -1, ends[-1]
    begin = run.ended[first] if settled else 0.0
    span, counted = run.ended[last] - begin, steps - settled
    busy: Counter[Resource] = Counter()
    for operation, begun, ended in zip(run.operations, run.begun, run.ended, strict=True):
        inside = min(ended, run.ended[last]) - max(begun, begin)
        if inside > 0:
            busy[operation.resource] += inside  # type: ignore[assignment]
    path: Counter[Kind] = Counter()
    for index in run.critical_path(last):
        inside = run.ended[index] - max(run.begun[index], begin)
        if inside > 0:
            path[run.operations[index].kind] += inside  # type: ignore[assignment]
    by_resource: Counter[Resource] = Counter()
    for kind, spent in path.items():
        by_resource[Operation(kind, 0, 0, ()).resource] += spent
    return SteadyState(
        step_s=span / counted,
        busy_ratio={r: busy[r] / span if span else 0.0 for r in Resource},
        path_s={kind: spent / counted for kind, spent in path.items()},
        bottleneck=max(Resource, key=lambda r: by_resource[r]),
    )


def _step_ends(run: Run[Operation], passes: int, steps: int) -> list[int]:
    """The index of the last computation of each step."""
    ends = [-1] * steps
    for index, operation in enumerate(run.operations):
        if operation.resource is Resource.COMPUTE and operation.position // passes < steps:
            ends[operation.position // passes] = index
    if -1 in ends:
        raise ValueError(f"step {ends.index(-1)} of {steps} computes nothing")
    return ends


# The time of a run's step -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prediction(SteadyState):
    """The steady state of a run. ``evidence``: that of the weakest input. ``degrees``: chunks of the passes over experts;
    None if no rows travel. ``one_chunk_s``: seconds of a step whose passes all use one chunk.
    """

    tokens_per_s: float
    traffic: Traffic
    evidence: Evidence
    degrees: LayerDegrees | None
    one_chunk_s: float

    @property
    def chunks_save_s(self) -> float:
        """Seconds that chunks save in a step; negative if they cost time."""
        return self.one_chunk_s - self.step_s


def predict(setting: Setting, profile: Profile, taken: Capacity | None = None) -> Prediction:
    """Simulate some steps of ``setting``. Raises BudgetError, ConfigError."""
    taken = taken or capacity(setting)
    traffic = step_traffic(setting, taken)
    workload = StepWorkload(setting, taken, traffic, profile)
    one = result = simulated(workload)
    degrees = layer_degrees(workload)
    if degrees is not None and max(degrees.taken.values(), default=1) > 1:
        result = simulated(replace(workload, chunks=degrees.taken))
    return Prediction(
        **vars(result),
        tokens_per_s=setting.tokens_per_step / result.step_s,
        traffic=traffic,
        evidence=profile.evidence.weaker(traffic.evidence),
        degrees=degrees,
        one_chunk_s=one.step_s,
    )


def simulated(workload: StepWorkload) -> SteadyState:
    """Simulate ``workload``; returns its steady state."""
    passes = workload.passes
    known: dict[tuple[Kind, Pass, int], float] = {}  # steps and micro-batches repeat their passes

    def seconds(operation: Operation) -> float:
        key = operation.kind, passes[operation.position % len(passes)], operation.nbytes
        if key not in known:
            known[key] = workload.seconds(operation)
        return known[key]

    return outcome(simulate(workload.operations, seconds), len(passes), steps=STEPS, settled=SETTLED)
