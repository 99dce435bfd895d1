"""The breakdown of a step's time: computing, slowed by neighbours, waiting.

One thread at a time drives a step. At any moment it is on a processor, in a run queue behind others, or blocked; the
kernel counts the first two. While blocked, it stalls, which the ledger charges by cause, or waits for other threads of
this process: those that share torch's operations (an operation ends at a barrier, where a thread that lost its processor
delays the others), and the engine's (at a lock, or while it wakes one: glibc's pthread_cond_signal waits for threads that
were woken before and have yet to run). So

    wall = computing + run queue + stolen + device + threads + stalls + unaccounted

``device`` is the time in which it waits for what an accelerator has yet to compute. The thread's work during a stall, or
such a wait, counts as the stall or the wait. ``unaccounted`` is time blocked with no known reason; it may be slightly
negative, since the parts are measured separately.

The kernel counts time stolen by a hypervisor for the machine, not for threads: the driving thread's share is proportional
to its time on processors. It is subtracted from that time, or, if the kernel excludes it there, from the time that the
thread seems to be blocked.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from tierstore.accelerator import device_waits
from tierstore.stats import Cause, StallLedger


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of ``wall_s``, seconds. Parts that the kernel counts are None if it does not."""

    wall_s: float
    computing_s: float  # on a processor
    run_queue_s: float | None  # runnable, while others ran
    stolen_s: float | None  # by the hypervisor
    threads_s: float | None  # blocked outside of stalls, until torch's or the engine's threads continued
    device_s: float = 0.0  # until an accelerator had computed
    stalls_s: Mapping[Cause, float] = field(default_factory=dict)
    unaccounted_s: float = 0.0
    #: Not parts of the sum: those threads' time meanwhile, on processors and in run queues.
    torch_cpu_s: float | None = None
    torch_queued_s: float | None = None
    engine_cpu_s: float | None = None
    engine_queued_s: float | None = None

    @property
    def stall_s(self) -> float:
        return sum(self.stalls_s.values())

    @property
    def longest_stalls(self) -> list[tuple[Cause, float]]:
        """Causes and seconds, longest first."""
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
        """The JSON form: stalls by cause, longest first."""
        found: dict[str, object] = {one.name: getattr(self, one.name) for one in fields(self)}
        found["stall_s"] = self.stall_s
        found["stalls"] = [
            {"cause": cause.value, "stall_s": seconds} for cause, seconds in self.longest_stalls
        ]
        del found["stalls_s"]
        return found


class StepTimer:
    """Measures steps: reads a few small files at the beginning and end of each step, one at those of a stall."""

    def __init__(
        self,
        ledger: StallLedger,
        threads: ThreadTimes,
        stolen: Stolen,
        *,
        clock: Callable[[], float] = time.monotonic,
        device_waits: StallLedger = device_waits,
    ) -> None:
        self._ledger = ledger
        self._device_waits = device_waits
        self._threads = threads
        self._stolen = stolen
        self._clock = clock
        self._stepping = False
        self._stall_began = self._stalled = ThreadSeconds()
        #: The last complete step, and the sum of all.
        self.last: StepTime | None = None
        self.total: StepTime | None = None
        for waits in (ledger, device_waits):
            waits.watch(self._stall_begins, self._stall_ends)

    def describe(self) -> str:
        """One line: the parts that are measured, and why others are not."""
        if self._threads.unavailable:
            return f"step time: processor time and stalls, no run queues ({self._threads.unavailable})"
        return "step time: processors, run queues and stalls, by thread (schedstat)"

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measures the block; a block that raises is not counted."""
        charged, device_ns = self._charged_ns(), self._device_waits.total_ns
        before, began_s = self._threads.read(), self._clock()
        self._stepping, self._stalled = True, ThreadSeconds()
        try:
            yield
        finally:
            self._stepping = False
        wall_s, after = self._clock() - began_s, self._threads.read()
        grown = {cause: ns - charged.get(cause, 0) for cause, ns in self._charged_ns().items()}
        stalls = {cause: ns / 1e9 for cause, ns in grown.items() if ns}
        device_s = (self._device_waits.total_ns - device_ns) / 1e9
        self.last = self._divided(before, after, wall_s, stalls, device_s)
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
        self, before: Reading, after: Reading, wall_s: float, stalls: Mapping[Cause, float], device_s: float
    ) -> StepTime:
        own = after.since(before, ThreadRole.DRIVER) - self._stalled
        blocked_s = wall_s - sum(stalls.values()) - device_s - own.running_s - own.queued_s
        if self._threads.unavailable:
            return StepTime(
                wall_s=wall_s,
                computing_s=own.running_s,
                run_queue_s=None,
                stolen_s=None,
                threads_s=None,
                device_s=device_s,
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
            device_s=device_s,
            stalls_s=stalls,
            unaccounted_s=blocked_s - waited_s,
            torch_cpu_s=torch.running_s,
            torch_queued_s=torch.queued_s,
            engine_cpu_s=engine.running_s,
            engine_queued_s=engine.queued_s,
        )


# Thread times from the kernel -------------------------------------------------------------------------------
#
# The kernel counts each thread's time on processors and in run queues. Linux only: ``/proc/self/task/*/schedstat`` and
# ``/proc/stat``. Without them only the caller's time on processors is known.


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ThreadRole(Enum):
    """The role of a thread."""

    DRIVER = "driver"  # the caller, and autograd's device thread: one of them at a time drives a step
    TORCH = "torch"  # shares torch's operations
    ENGINE = "engine"
    OTHER = "other"  # a Python thread


class Stolen(Enum):
    """Whether the kernel counts time stolen from a running thread as its time on a processor."""

    COUNTED = "counted"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class ThreadSeconds:
    """Seconds of threads since their start: on processors, and in run queues."""

    running_s: float = 0.0
    queued_s: float = 0.0

    def __add__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(self.running_s + other.running_s, self.queued_s + other.queued_s)

    def __sub__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(self.running_s - other.running_s, self.queued_s - other.queued_s)


@dataclass(frozen=True)
class Reading:
    """The counts at one instant, seconds: by thread, and of all processors of the machine."""

    threads: Mapping[int, tuple[ThreadRole, ThreadSeconds]]
    busy_s: float = 0.0
    stolen_s: float = 0.0

    def since(self, earlier: Reading, role: ThreadRole) -> ThreadSeconds:
        """Time of the threads of ``role`` since ``earlier``; for a thread started later, since its start."""
        total = ThreadSeconds()
        for thread, (own, spent) in self.threads.items():
            if own is role:
                total += spent - earlier.threads.get(thread, (own, ThreadSeconds()))[1]
        return total


def _thread_cpu_s(thread: int) -> float:
    """A thread's time on processors, exact at any instant: schedstat's is up to a tick late."""
    return time.clock_gettime_ns((~thread << 3) | 6) / 1e9  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class ThreadTimes:
    """Reads the counts; created by the driving thread, and closed at the end."""

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        caller: int | None = None,
        thread_cpu_s: Callable[[int], float] = _thread_cpu_s,
    ) -> None:
        self._tasks = proc / "self" / "task"
        self._thread_cpu_s = thread_cpu_s
        self._caller = threading.get_native_id() if caller is None else caller
        self._roles: dict[int, ThreadRole] = {}
        #: The driving threads in ``_roles``.
        self._driving: list[int] = []
        self._schedstat: dict[int, int] = {}
        self._stat = -1
        #: Why only the caller's time on processors is known; empty if all counts are.
        self.unavailable = ""
        try:
            self._stat = os.open(proc / "stat", os.O_RDONLY | os.O_CLOEXEC)
            (self._tasks / str(self._caller) / "schedstat").read_text()
        except OSError as error:
            self.unavailable = f"{error.filename}: {error.strerror}"
        else:
            self._find_threads()

    def read(self) -> Reading:
        """All counts; detects threads that started or ended."""
        if self.unavailable:
            return Reading({self._caller: (ThreadRole.DRIVER, self.drivers())})
        self._find_threads()
        threads = {}
        for thread, role in list(self._roles.items()):
            if role is not ThreadRole.OTHER and (spent := self._spent(thread)) is not None:
                threads[thread] = (role, spent)
        fields = os.pread(self._stat, 256, 0).split()
        user, nice, system, _, _, irq, softirq, stolen = map(int, fields[1:9])
        return Reading(threads, (user + nice + system + irq + softirq) * _TICK_S, stolen * _TICK_S)

    def drivers(self) -> ThreadSeconds:
        """Time of the driving threads. Takes a few microseconds: it looks for no new threads."""
        if self.unavailable:
            return ThreadSeconds(self._thread_cpu_s(self._caller))
        total = ThreadSeconds()
        for thread in tuple(self._driving):
            if (spent := self._spent(thread)) is not None:
                total += spent
        return total

    def _spent(self, thread: int) -> ThreadSeconds | None:
        """A thread's times; None for one that has ended."""
        try:
            queued_ns = int(os.pread(self._schedstat[thread], 64, 0).split()[1])
            return ThreadSeconds(self._thread_cpu_s(thread), queued_ns / 1e9)
        except (OSError, IndexError):
            self._forget(thread)
            return None

    def _find_threads(self) -> None:
        present = set(map(int, os.listdir(self._tasks)))
        for thread in self._roles.keys() - present:
            self._forget(thread)
        new = present - self._roles.keys()
        python = {thread.native_id for thread in threading.enumerate()} if new else set()
        for thread in new:
            with contextlib.suppress(OSError):  # it has ended already
                name = (self._tasks / str(thread) / "comm").read_text()
                flags = os.O_RDONLY | os.O_CLOEXEC
                self._schedstat[thread] = os.open(self._tasks / str(thread) / "schedstat", flags)
                role = self._roles[thread] = self._role(thread, name, python)
                if role is ThreadRole.DRIVER:
                    self._driving.append(thread)

    def _role(self, thread: int, name: str, python: set[int | None]) -> ThreadRole:
        if thread == self._caller or name.startswith("pt_autograd"):
            return ThreadRole.DRIVER
        if name.startswith(("tierstore-", "iou-")):  # the engine's own, and the kernel's for its ring
            return ThreadRole.ENGINE
        return ThreadRole.OTHER if thread in python else ThreadRole.TORCH

    def _forget(self, thread: int) -> None:
        if self._roles.pop(thread, None) is ThreadRole.DRIVER:
            self._driving.remove(thread)
        if thread in self._schedstat:
            os.close(self._schedstat.pop(thread))

    def close(self) -> None:
        """Safe to call twice."""
        for thread in list(self._roles):
            self._forget(thread)
        if self._stat >= 0:
            os.close(self._stat)
            self._stat = -1


def stolen_while_running(proc: Path = Path("/proc"), boot: Path = Path("/boot")) -> Stolen:
    """The configuration of this kernel (PARAVIRT_TIME_ACCOUNTING excludes it), or that of most kernels if it is unknown."""
    for path in (proc / "config.gz", boot / f"config-{platform.release()}"):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            kept = re.search(rb"^CONFIG_PARAVIRT_TIME_ACCOUNTING=y$", text, re.MULTILINE)
            return Stolen.LEFT_OUT if kept else Stolen.COUNTED
    return Stolen.LEFT_OUT
