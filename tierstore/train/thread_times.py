"""What the kernel counts for the threads of this process: time on processors, and in run queues.

Linux only: ``/proc/self/task/*/schedstat`` and ``/proc/stat``. Without them only the caller's time on processors is known.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ThreadRole(Enum):
    """What a thread is there for."""

    DRIVER = "driver"  # the caller, and autograd's for a device: one of them at a time drives a step
    TORCH = "torch"  # shares torch's operations
    ENGINE = "engine"
    OTHER = "other"  # a Python thread


class Stolen(Enum):
    """Whether time that a hypervisor takes from a running thread counts as its time on a processor."""

    COUNTED = "counted"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class ThreadSeconds:
    """What threads spent since they were made, seconds: on processors, and in run queues."""

    running_s: float = 0.0
    queued_s: float = 0.0

    def __add__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(self.running_s + other.running_s, self.queued_s + other.queued_s)

    def __sub__(self, other: ThreadSeconds) -> ThreadSeconds:
        return ThreadSeconds(self.running_s - other.running_s, self.queued_s - other.queued_s)


@dataclass(frozen=True)
class Reading:
    """The counts at one moment: by thread, and of all processors of the machine, seconds."""

    threads: Mapping[int, tuple[ThreadRole, ThreadSeconds]]
    busy_s: float = 0.0
    stolen_s: float = 0.0

    def since(self, earlier: Reading, role: ThreadRole) -> ThreadSeconds:
        """What the threads of ``role`` spent after ``earlier``; one that was made since, in all its life."""
        total = ThreadSeconds()
        for thread, (own, spent) in self.threads.items():
            if own is role:
                total += spent - earlier.threads.get(thread, (own, ThreadSeconds()))[1]
        return total


def _thread_cpu_s(thread: int) -> float:
    """Time that a thread of this process was on processors, exact at any moment: schedstat's is up to a tick late."""
    return time.clock_gettime_ns((~thread << 3) | 6) / 1e9  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class ThreadTimes:
    """Reads the counts; made by the thread that drives, and closed at the end."""

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
        #: Those that drive, of ``_roles``.
        self._driving: list[int] = []
        self._schedstat: dict[int, int] = {}
        self._stat = -1
        #: Why only the caller's time on processors is known; empty if all is.
        self.unavailable = ""
        try:
            self._stat = os.open(proc / "stat", os.O_RDONLY | os.O_CLOEXEC)
            (self._tasks / str(self._caller) / "schedstat").read_text()
        except OSError as error:
            self.unavailable = f"{error.filename}: {error.strerror}"
        else:
            self._find_threads()

    def read(self) -> Reading:
        """All counts; threads that came or went are found."""
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
        """What the driving threads spent, in a few microseconds: it looks for no new ones."""
        if self.unavailable:
            return ThreadSeconds(self._thread_cpu_s(self._caller))
        total = ThreadSeconds()
        for thread in tuple(self._driving):
            if (spent := self._spent(thread)) is not None:
                total += spent
        return total

    def _spent(self, thread: int) -> ThreadSeconds | None:
        """None for a thread that has ended."""
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
    """As this kernel was configured (PARAVIRT_TIME_ACCOUNTING leaves it out), or as most are where that is not known."""
    for path in (proc / "config.gz", boot / f"config-{platform.release()}"):
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            kept = re.search(rb"^CONFIG_PARAVIRT_TIME_ACCOUNTING=y$", text, re.MULTILINE)
            return Stolen.LEFT_OUT if kept else Stolen.COUNTED
    return Stolen.LEFT_OUT
