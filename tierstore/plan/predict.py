"""The time of a step and how it is spent: a run's schedule, simulated with a machine's costs.

A discrete-event simulation of the schedule's operations.

Each resource has one server, which processes one operation at a time, without preemption.
Computation and collectives run in program order: one thread computes, and every rank must issue collectives in the same
order. Copies, the disk and the engine's threads serve ready operations, the first ready first; the steps of gradients in
spare buffers only when there are no others, the one that is due first.

The step time is that of the steady state: from the end of one step's computation to the end of the next one's. The critical
path is traced back from there: from each operation to the one whose end let it begin, a dependency or the previous operation
on its server. The bottleneck is the resource on which the path spends the most time.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from tierstore.machine_profile import Evidence, Profile
from tierstore.plan.capacity import Capacity, Setting, capacity
from tierstore.plan.traffic import Traffic, step_traffic
from tierstore.plan.workload import SETTLED, STEPS, LayerDegrees, StepWorkload, layer_degrees
from tierstore.prefetch.operations import Kind, Operation, Resource
from tierstore.prefetch.schedule import Pass


class Occupying(Protocol):
    """An operation that occupies ``resource`` once the earlier operations with the indices ``after`` have ended. Of those
    that are ready, a resource serves one with the least ``due``.
    """

    @property
    def resource(self) -> Hashable: ...
    @property
    def after(self) -> Sequence[int]: ...
    @property
    def due(self) -> int: ...


T = TypeVar("T", bound=Occupying)

#: The resources that serve their operations in program order.
IN_ORDER: Collection[Hashable] = (Resource.COMPUTE, Resource.GATHER)


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
    operations: Sequence[T], seconds: Callable[[T], float], *, in_order: Collection[Hashable] = IN_ORDER
) -> Run[T]:
    """Simulate ``operations``: each takes ``seconds`` of its resource's server, once the operations in its ``after`` have
    ended. The servers of ``in_order`` serve in program order, the others by ``due``, then the first ready first. Raises
    ValueError if an operation depends on a later one.
    """
    begun, ended, ready = ([0.0] * len(operations) for _ in range(3))
    cause = [-1] * len(operations)
    missing = [len(operation.after) for operation in operations]
    followers: list[list[int]] = [[] for _ in operations]
    program: dict[Hashable, deque[int]] = {resource: deque() for resource in in_order}  # not served yet
    queues: dict[Hashable, list[tuple[int, float, int]]] = {}  # heaps of ready operations, the next one first
    last_ended: dict[Hashable, int] = {}
    busy: set[Hashable] = set()
    running: list[tuple[float, int]] = []  # a heap, by end time
    for index, operation in enumerate(operations):
        queues[operation.resource] = []
        if operation.resource in program:
            program[operation.resource].append(index)
        for before in operation.after:
            if not 0 <= before < index:
                raise ValueError(f"operation {index} depends on {before}, which does not come before it")
            followers[before].append(index)

    def make_ready(index: int, now: float, before: int) -> None:
        ready[index], cause[index] = now, before
        resource = operations[index].resource
        key = (0, 0.0) if resource in program else (operations[index].due, now)
        heapq.heappush(queues[resource], (*key, index))

    def dispatch(now: float) -> None:
        for resource, queue in queues.items():
            if resource in busy or not queue:
                continue
            if resource in program:
                if queue[0][-1] != program[resource][0]:
                    continue
                program[resource].popleft()
            index = heapq.heappop(queue)[-1]
            busy.add(resource)
            if ready[index] < now:  # it waited for its server
                cause[index] = last_ended[resource]
            begun[index], ended[index] = now, now + seconds(operations[index])
            heapq.heappush(running, (ended[index], index))

    for index, count in enumerate(missing):
        if count == 0:
            make_ready(index, 0.0, -1)
    dispatch(0.0)
    while running:
        now = running[0][0]
        while running and running[0][0] == now:
            index = heapq.heappop(running)[1]
            busy.discard(operations[index].resource)
            last_ended[operations[index].resource] = index
            for follower in followers[index]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    make_ready(follower, now, index)
        dispatch(now)
    return Run(operations, begun, ended, cause)


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


def predict(
    setting: Setting, profile: Profile, taken: Capacity | None = None, traffic: Traffic | None = None
) -> Prediction:
    """Simulate some steps of ``setting``. ``taken``, ``traffic``: its capacity and traffic, if known. Raises BudgetError,
    ConfigError.
    """
    taken = taken or capacity(setting)
    traffic = traffic or step_traffic(setting, taken)
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
