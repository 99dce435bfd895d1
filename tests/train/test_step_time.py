"""Where a step's time goes: a worked example over texts as the kernel writes them, and real steps that add up."""

import gzip
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tierstore.stats import Cause, StallLedger, Tier
from tierstore.train.config import TrainConfig
from tierstore.train.ranks import Opening
from tierstore.train.report import step_rows
from tierstore.train.session import open_session
from tierstore.train.step_time import StepTime, StepTimer, Stolen, ThreadTimes, stolen_while_running

CALLER, WORKER, ENGINE, AUTOGRAD = 11, 12, 13, 14
NAMES = {CALLER: "python", WORKER: "python", ENGINE: "tierstore-work", AUTOGRAD: "pt_autograd_0"}


@dataclass
class Machine:
    """A process as ``/proc`` shows it, and a clock that stands still."""

    proc: Path
    now_s: float = 50.0
    cpu_s: dict[int, float] = field(default_factory=dict)

    def thread(self, thread: int, running_s: float, queued_s: float) -> None:
        """A thread and what it spent in all; on a processor to the nanosecond, schedstat's first column lags."""
        task = self.proc / "self" / "task" / str(thread)
        task.mkdir(parents=True, exist_ok=True)
        (task / "comm").write_text(f"{NAMES[thread]}\n")
        (task / "schedstat").write_text(f"{int(running_s * 0.9e9)} {round(queued_s * 1e9)} 77\n")
        self.cpu_s[thread] = running_s

    def processors(self, busy_ticks: int, stolen_ticks: int) -> None:
        """Busy: user, nice, system, irq and softirq; idle, iowait and guest do not count."""
        rest = busy_ticks - 4
        (self.proc / "stat").write_text(f"cpu  {rest} 1 1 900 80 1 1 {stolen_ticks} 7 0\ncpu0 0 0 0\n")

    def timer(self, ledger: StallLedger, stolen: Stolen = Stolen.LEFT_OUT) -> StepTimer:
        threads = ThreadTimes(proc=self.proc, caller=CALLER, thread_cpu_s=self.cpu_s.__getitem__)
        return StepTimer(ledger, threads, stolen, clock=lambda: self.now_s)

    def ledger(self) -> StallLedger:
        return StallLedger(clock=lambda: round(self.now_s * 1e9))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.thread(CALLER, 10.0, 5.0)
    made.thread(WORKER, 8.0, 3.0)
    made.thread(ENGINE, 1.0, 1.0)
    made.processors(1000, 50)
    return made


def step(machine: Machine, timer: StepTimer, ledger: StallLedger, *, worker: tuple[float, float]) -> StepTime:
    """Two seconds: 0.3 stalled on a read, in which the caller ran for 0.05 and was queued for 0.1; in all it ran for 0.8
    and was queued for 0.5. The engine ran for 0.02 and was queued for 0.03; the machine ran for 2 s, and 0.2 were stolen.
    """
    with timer.step():
        machine.now_s += 0.7
        machine.thread(CALLER, 10.4, 5.2)
        with ledger.stall(layer=1, tier=Tier.NVME, cause=Cause.DEMAND_READ):
            machine.now_s += 0.1
            with ledger.stall(layer=1, tier=Tier.NVME, cause=Cause.LATE_PREFETCH):
                machine.now_s += 0.2
            machine.thread(CALLER, 10.45, 5.3)
        machine.now_s += 1.0
        machine.thread(CALLER, 10.8, 5.5)
        machine.thread(WORKER, 8.0 + worker[0], 3.0 + worker[1])
        machine.thread(ENGINE, 1.02, 1.03)
        machine.processors(1200, 70)
    assert timer.last is not None
    return timer.last


def parts(found: StepTime) -> float:
    own = (found.computing_s, found.run_queue_s, found.stolen_s, found.threads_s, found.unaccounted_s)
    return sum(part for part in own if part is not None) + found.device_s + found.stall_s


def test_by_hand(machine: Machine) -> None:
    """Out of the stalls: ran 0.75, queued 0.4, so blocked 2 - 0.3 - 0.75 - 0.4 = 0.55, of which the caller's part of the
    time stolen, 0.2 * 0.75 / 2 = 0.075. The rest, 0.475, is less than the 1.05 s that other threads ran or were queued.
    """
    ledger = machine.ledger()
    found = step(machine, machine.timer(ledger), ledger, worker=(0.6, 0.4))
    assert found.wall_s == pytest.approx(2.0)
    assert found.computing_s == pytest.approx(0.75)
    assert found.run_queue_s == pytest.approx(0.4)
    assert found.stolen_s == pytest.approx(0.075)
    assert found.threads_s == pytest.approx(0.475)
    assert found.stalls_s == {Cause.DEMAND_READ: pytest.approx(0.1), Cause.LATE_PREFETCH: pytest.approx(0.2)}
    assert found.unaccounted_s == pytest.approx(0.0, abs=1e-6)
    assert (found.torch_cpu_s, found.torch_queued_s) == (pytest.approx(0.6), pytest.approx(0.4))
    assert (found.engine_cpu_s, found.engine_queued_s) == (pytest.approx(0.02), pytest.approx(0.03))
    assert parts(found) == pytest.approx(found.wall_s)


def test_waiting_for_a_device_is_no_stall(machine: Machine) -> None:
    """Three seconds: one computing, two in which the host waits for the device, half a second of it spinning."""
    ledger, device = machine.ledger(), machine.ledger()
    threads = ThreadTimes(proc=machine.proc, caller=CALLER, thread_cpu_s=machine.cpu_s.__getitem__)
    timer = StepTimer(ledger, threads, Stolen.LEFT_OUT, clock=lambda: machine.now_s, device_waits=device)
    with timer.step():
        machine.now_s += 1.0
        machine.thread(CALLER, 11.0, 5.0)
        with device.stall(layer=None, tier=Tier.DEVICE, cause=Cause.COMPUTING):
            machine.now_s += 2.0
            machine.thread(CALLER, 11.5, 5.0)
    found = timer.last
    assert (found.device_s, found.computing_s) == (pytest.approx(2.0), pytest.approx(1.0))
    assert (found.stall_s, ledger.total_ns) == (0, 0)
    assert parts(found) == pytest.approx(found.wall_s)
    assert ("waiting: the device computes", "2 s", "66.7%") in step_rows(found)


def test_what_nobody_is_charged_for_is_said(machine: Machine) -> None:
    """Other threads ran and were queued for 0.2 + 0.05 together: for the rest nobody can have waited for them."""
    ledger = machine.ledger()
    found = step(machine, machine.timer(ledger), ledger, worker=(0.15, 0.05))
    assert found.threads_s == pytest.approx(0.25)
    assert found.unaccounted_s == pytest.approx(0.225)
    assert parts(found) == pytest.approx(found.wall_s)


def test_stolen_time_that_counts_as_running(machine: Machine) -> None:
    """Of 2.2 s that the machine's processors were busy or stolen, 0.2 were: so much of the caller's 0.75 as well."""
    ledger = machine.ledger()
    found = step(machine, machine.timer(ledger, Stolen.COUNTED), ledger, worker=(0.6, 0.4))
    assert found.stolen_s == pytest.approx(0.75 * 0.2 / 2.2)
    assert found.computing_s == pytest.approx(0.75 * 2.0 / 2.2)
    assert found.threads_s == pytest.approx(0.55)
    assert parts(found) == pytest.approx(found.wall_s)


def test_steps_add_up_and_what_is_between_them_does_not_count(machine: Machine) -> None:
    ledger = machine.ledger()
    timer = machine.timer(ledger)
    first = step(machine, timer, ledger, worker=(0.6, 0.4))
    with ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.COMMIT):
        machine.now_s += 9
        machine.thread(CALLER, 12.0, 9.0)
    with timer.step():
        machine.now_s += 1
        machine.thread(CALLER, 13.0, 9.0)
    assert (timer.last.wall_s, timer.last.computing_s) == (pytest.approx(1), pytest.approx(1))
    assert timer.last.stalls_s == {}
    assert timer.total == first + timer.last
    assert timer.total.wall_s == pytest.approx(3)
    assert timer.total.stalls_s == first.stalls_s
    with pytest.raises(ZeroDivisionError), timer.step():
        raise ZeroDivisionError
    assert timer.total.wall_s == pytest.approx(3)


def test_threads_come_and_go(machine: Machine) -> None:
    """One that is made in the step counts with all its life; autograd's drives as the caller does; one ends."""
    ledger = machine.ledger()
    timer = machine.timer(ledger)
    with timer.step():
        machine.now_s += 1
        machine.thread(AUTOGRAD, 0.6, 0.1)
        machine.thread(CALLER, 10.3, 5.0)
        task = machine.proc / "self" / "task" / str(ENGINE)
        for file in task.iterdir():
            file.unlink()
        task.rmdir()
    assert timer.last.computing_s == pytest.approx(0.9)
    assert timer.last.run_queue_s == pytest.approx(0.1)
    assert timer.last.engine_cpu_s == 0.0


def test_without_schedstat(machine: Machine) -> None:
    (machine.proc / "self" / "task" / str(CALLER) / "schedstat").unlink()
    ledger = machine.ledger()
    timer = machine.timer(ledger)
    assert "no run queues" in timer.describe()
    assert "schedstat: No such file" in timer.describe()
    with timer.step():
        machine.now_s += 0.4
        machine.cpu_s[CALLER] += 0.1
        with ledger.stall(layer=1, tier=Tier.NVME, cause=Cause.DEMAND_READ):
            machine.now_s += 0.5
            machine.cpu_s[CALLER] += 0.01
    found = timer.last
    assert (found.run_queue_s, found.stolen_s, found.threads_s) == (None, None, None)
    assert found.computing_s == pytest.approx(0.1)
    assert found.unaccounted_s == pytest.approx(0.3)
    assert found.as_dict()["run_queue_s"] is None
    assert [row[0] for row in step_rows(found)] == ["computing", "waiting: demand read", "unaccounted"]
    assert (found + found).run_queue_s is None


def test_the_object_and_the_table(machine: Machine) -> None:
    ledger = machine.ledger()
    found = step(machine, machine.timer(ledger), ledger, worker=(0.6, 0.4))
    value = json.loads(json.dumps(found.as_dict()))
    assert value["stall_s"] == pytest.approx(0.3)
    assert value["stalls"] == [
        {"cause": "late prefetch", "stall_s": pytest.approx(0.2)},
        {"cause": "demand read", "stall_s": pytest.approx(0.1)},
    ]
    assert all(name.endswith("_s") for name in value if name != "stalls")
    assert step_rows(found)[:2] == [
        ("computing", "750 ms", "37.5%"),
        ("slowed: in the run queue", "400 ms", "20.0%"),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("CONFIG_PARAVIRT_TIME_ACCOUNTING=y", Stolen.LEFT_OUT),
        ("# CONFIG_PARAVIRT_TIME_ACCOUNTING is not set", Stolen.COUNTED),
    ],
)
def test_where_stolen_time_counts(tmp_path: Path, line: str, expected: Stolen) -> None:
    assert stolen_while_running(tmp_path, tmp_path) is Stolen.LEFT_OUT, "not known: as most kernels"
    text = f"CONFIG_PARAVIRT=y\n{line}\nCONFIG_X=y\n".encode()
    (tmp_path / f"config-{os.uname().release}").write_bytes(text)
    assert stolen_while_running(tmp_path / "none", tmp_path) is expected
    (tmp_path / "config.gz").write_bytes(gzip.compress(text))
    assert stolen_while_running(tmp_path, tmp_path / "none") is expected


# On this machine --------------------------------------------------------------------------------------------


@pytest.fixture
def real() -> Iterator[tuple[StallLedger, StepTimer]]:
    threads, ledger = ThreadTimes(), StallLedger()
    timer = StepTimer(ledger, threads, stolen_while_running())
    if threads.unavailable:
        pytest.skip(timer.describe())
    yield ledger, timer
    threads.close()


def spin(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


def queued_s() -> float:
    """How long this thread has stood in run queues, by the kernel."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def test_each_kind_of_time_is_told_from_the_others(real: tuple[StallLedger, StepTimer]) -> None:
    """A tenth of a second computed, two slept in a stall, three slept that nobody is charged for: each is in its part, and
    no part has more than clocks around the step leave for it.
    """
    ledger, timer = real
    computed, began = time.thread_time(), time.monotonic()
    with timer.step():
        spin(0.1)
        with ledger.stall(layer=None, tier=Tier.NVME, cause=Cause.DEMAND_READ):
            time.sleep(0.2)
        time.sleep(0.3)
    computed, wall = time.thread_time() - computed, time.monotonic() - began
    found = timer.last
    assert found.computing_s <= computed
    assert found.computing_s + (found.stolen_s or 0.0) >= 0.1
    assert 0.2 <= found.stall_s <= wall - 0.1 - 0.3
    # Until torch's threads went on, or nobody's; the sleeper may have been woken long before it ran.
    blocked = found.unaccounted_s + (found.threads_s or 0.0) + (found.stolen_s or 0.0)
    assert blocked + found.run_queue_s >= 0.3 - 1e-3
    assert parts(found) == pytest.approx(found.wall_s)


def test_a_neighbour_on_the_same_processor(real: tuple[StallLedger, StepTimer]) -> None:
    """Two that spin on one processor: while the other has it, this one stands in the run queue."""
    _, timer = real
    before = os.sched_getaffinity(0)
    processor = min(before)
    neighbour = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile 1: pass",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        neighbour.stdout.readline()
        os.sched_setaffinity(threading.get_native_id(), {processor})
        queued = queued_s()
        with timer.step():
            spin(0.3)
        queued = queued_s() - queued
    finally:
        os.sched_setaffinity(threading.get_native_id(), before)
        neighbour.kill()
        neighbour.communicate()
    found = timer.last
    assert found.computing_s + (found.stolen_s or 0.0) >= 0.3
    assert 0 < found.run_queue_s <= queued
    assert parts(found) == pytest.approx(found.wall_s)


Make = Callable[[Mapping[str, Any]], TrainConfig]


@pytest.mark.parametrize("threads", [1, 2])
def test_the_parts_of_real_steps_add_up(
    configure: Make, least: Callable[[TrainConfig], int], threads: int
) -> None:
    """A tight budget, so that there are stalls. With one thread there is no other of torch's to wait for."""
    config = configure({"threads": threads, "model.d_model": 64, "model.d_ff": 128, "model.seq_len": 64})
    config = replace(config, host_budget=2 * least(config))
    with open_session(config, Opening.CREATE) as trainer:
        if "no run queues" in trainer.timer.describe():
            pytest.skip(trainer.timer.describe())
        seconds = sum(trainer.step().seconds for _ in range(20))
        total = trainer.timer.total
    assert 0 < seconds <= total.wall_s  # which begins before the step and ends after it
    assert total.stall_s > 0
    assert min(total.computing_s, total.wall_s - total.computing_s) > 0
    assert parts(total) == pytest.approx(total.wall_s)
