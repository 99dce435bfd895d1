"""Where the time of a step went: computing, slowed by neighbours, waiting.

One thread at a time drives a step. At any moment it is on a processor, in a run queue behind others, or blocked; the
kernel counts the first two. Blocked, it stalls, which the ledger charges by cause, or it waits for other threads of this
process: those that share torch's operations (an operation ends at a barrier, where a thread that lost its processor keeps
the others), and the engine's (at a lock, or while it wakes one: glibc's pthread_cond_signal waits for threads that were
woken before and have yet to run). So

    wall = computing + run queue + stolen + threads + stalls + unaccounted

What the thread does in a stall counts as the stall. ``unaccounted`` is time that was blocked and not charged while no
such thread ran or wanted to; it may be a little less than nothing, since the parts are measured apart.

A hypervisor that takes a processor away counts that as stolen, for the machine and not for threads: the driving thread's
share is that of its time on processors. It comes out of that time, or, where the kernel leaves it out there, out of the
time that the thread seems to be blocked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tierstore.stats import Cause, StallLedger
from tierstore.train.thread_times import Reading, Stolen, ThreadRole, ThreadSeconds, ThreadTimes


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of ``wall_s``, seconds. Those that the kernel counts are None where it does not."""

    wall_s: float
    computing_s: float  # on a processor
    run_queue_s: float | None  # able to run, while others did
    stolen_s: float | None  # by the hypervisor
    threads_s: float | None  # blocked, and not in a stall, until torch's or the engine's threads went on
    stalls_s: Mapping[Cause, float] = field(default_factory=dict)
    unaccounted_s: float = 0.0
    #: No parts: what those threads did meanwhile, on processors and in run queues.
    torch_cpu_s: float | None = None
    torch_queued_s: float | None = None
    engine_cpu_s: float | None = None
    engine_queued_s: float | None = None

    @property
    def stall_s(self) -> float:
        return sum(self.stalls_s.values())

    @property
    def longest_stalls(self) -> list[tuple[Cause, float]]:
        """Causes and seconds, the longest first."""
        return sorted(self.stalls_s.items(), key=lambda stall: (-stall[1], stall[0].value))

    def __add__(self, other: StepTime) -> StepTime:
        causes = {*self.stalls_s, *other.stalls_s}
        stalls = {cause: self.stalls_s.get(cause, 0.0) + other.stalls_s.get(cause, 0.0) for cause in causes}
        sums: dict[str, Any] = {"stalls_s": stalls}
        for name in (one.name for one in fields(self) if one.name not in sums):
            own, more = getattr(self, name), getattr(other, name)
            sums[name] = None if own is None or more is None else own + more
        return StepTime(**sums)

    def as_dict(self) -> dict[str, object]:
        """As JSON shows it: stalls by cause, longest first."""
        found: dict[str, object] = {one.name: getattr(self, one.name) for one in fields(self)}
        found["stall_s"] = self.stall_s
        found["stalls"] = [
            {"cause": cause.value, "stall_s": seconds} for cause, seconds in self.longest_stalls
        ]
        del found["stalls_s"]
        return found


class StepTimer:
    """Measures steps: a few small files are read at the begin and end of each, one at those of a stall."""

    def __init__(
        self,
        ledger: StallLedger,
        threads: ThreadTimes,
        stolen: Stolen,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger = ledger
        self._threads = threads
        self._stolen = stolen
        self._clock = clock
        self._stepping = False
        self._stall_began = self._stalled = ThreadSeconds()
        #: The last step that was not cut short, and the sum of all.
        self.last: StepTime | None = None
        self.total: StepTime | None = None
        ledger.watch(self._stall_begins, self._stall_ends)

    def describe(self) -> str:
        """One line: what is measured, and why not more."""
        if self._threads.unavailable:
            return f"step time: processor time and stalls, no run queues ({self._threads.unavailable})"
        return "step time: processors, run queues and stalls, by thread (schedstat)"

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block; one that raises counts for nothing."""
        charged = self._charged_ns()
        before, began_s = self._threads.read(), self._clock()
        self._stepping, self._stalled = True, ThreadSeconds()
        try:
            yield
        finally:
            self._stepping = False
        wall_s, after = self._clock() - began_s, self._threads.read()
        grown = {cause: ns - charged.get(cause, 0) for cause, ns in self._charged_ns().items()}
        stalls = {cause: ns / 1e9 for cause, ns in grown.items() if ns}
        self.last = self._divided(before, after, wall_s, stalls)
        self.total = self.last if self.total is None else self.total + self.last

    def _charged_ns(self) -> dict[Cause, int]:
        return self._ledger.totals(lambda key: key.cause)

    def _stall_begins(self) -> None:
        if self._stepping:
            self._stall_began = self._threads.drivers()

    def _stall_ends(self) -> None:
        if self._stepping:
            self._stalled += self._threads.drivers() - self._stall_began

    def _divided(
        self, before: Reading, after: Reading, wall_s: float, stalls: Mapping[Cause, float]
    ) -> StepTime:
        own = after.since(before, ThreadRole.DRIVER) - self._stalled
        blocked_s = wall_s - sum(stalls.values()) - own.running_s - own.queued_s
        if self._threads.unavailable:
            return StepTime(
                wall_s=wall_s,
                computing_s=own.running_s,
                run_queue_s=None,
                stolen_s=None,
                threads_s=None,
                stalls_s=stalls,
                unaccounted_s=blocked_s,
            )
        torch, engine = after.since(before, ThreadRole.TORCH), after.since(before, ThreadRole.ENGINE)
        computing_s = own.running_s
        busy_s, taken_s = after.busy_s - before.busy_s, after.stolen_s - before.stolen_s
        if self._stolen is Stolen.COUNTED:
            stolen_s = computing_s * taken_s / max(busy_s + taken_s, computing_s, 1e-9)
            computing_s -= stolen_s
        else:
            share = computing_s / max(busy_s, computing_s, 1e-9)
            stolen_s = min(taken_s * share, max(blocked_s, 0.0))
            blocked_s -= stolen_s
        others = torch + engine
        waited_s = min(max(blocked_s, 0.0), others.running_s + others.queued_s)
        return StepTime(
            wall_s=wall_s,
            computing_s=computing_s,
            run_queue_s=own.queued_s,
            stolen_s=stolen_s,
            threads_s=waited_s,
            stalls_s=stalls,
            unaccounted_s=blocked_s - waited_s,
            torch_cpu_s=torch.running_s,
            torch_queued_s=torch.queued_s,
            engine_cpu_s=engine.running_s,
            engine_queued_s=engine.queued_s,
        )
