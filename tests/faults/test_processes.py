"""Clocks that jump, thousands of openings, children, and races for one store."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from child_process import child, run_python
from conftest_store import small_store

from tierstore.bench.probes import MemoryLimit
from tierstore.errors import CapabilityError
from tierstore.store import StoreConfig

CONFIG = StoreConfig(host_budget=1 << 18)


# A clock that jumps -----------------------------------------------------------------------------------------

#: A library that stands before libc: years forth and back, at every question.
CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) {
    static unsigned asked;
    static const long years[] = {0, 40, -30, 7, -50, 1};
    return years[__atomic_fetch_add(&asked, 1, __ATOMIC_RELAXED) % 6] * 31557600L;
}
int clock_gettime(clockid_t id, struct timespec* at) {
    long rc = syscall(SYS_clock_gettime, id, at);
    if (rc == 0 && id == CLOCK_REALTIME) at->tv_sec += jump();
    return (int)rc;
}
int gettimeofday(struct timeval* at, void* zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t* at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""

CLOCK_RUN = """
import sys, time
import numpy as np
from tierstore.store import *
path, jumps = sys.argv[1], sys.argv[2] == "jumps"
ahead = [time.time() for _ in range(12)]
assert (max(ahead) - min(ahead) > 1e9) is jumps, ahead
config = StoreConfig(host_budget=1 << 18, retain=3)
names = []
with ParameterStore.create(path, [RecordSchema("expert", 1500)], config) as store:
    for number in range(5):
        store.register(f"e{number}", "expert", weight=np.full(1500, number, np.float32))
    for step in range(8):
        store.update({f"e{step % 5}": np.ones(1500, np.float32)}, lr=0.1)
        store.commit({"step": b"%d" % step}, snapshot=f"s{step}")
        names.append(store.last_commit.snapshots)
with ParameterStore.open(path, config) as store:
    assert store.verify().failures == []
    last = store.last_commit
    print(last.generation, store.records_crc32c(), names, last.snapshots, last.state["step"])
"""


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """Order of commits, retention and leases are of generations and of the monotonic clock, never of the date."""
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    built = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, source], capture_output=True, check=False
    )
    if built.returncode:
        pytest.skip("there is no C compiler to build the clock with")
    steady = run_python(CLOCK_RUN, tmp_path / "a", "steady")
    jumped = run_python(CLOCK_RUN, tmp_path / "b", "jumps", LD_PRELOAD=str(library))
    assert jumped.stdout == steady.stdout
    assert "['s5', 's6', 's7']" in steady.stdout


# Thousands of openings --------------------------------------------------------------------------------------

CYCLES = """
import gc, os, resource, sys, threading
import psutil
from tierstore.store import *
path, cycles, backend = sys.argv[1], int(sys.argv[2]), sys.argv[3]
io = IoConfig(backend=IoBackendName(backend), threads=2, compute_threads=2)
config = StoreConfig(host_budget=1 << 18, io=io)
me = psutil.Process()
def measure():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), me.memory_info().rss
def cycle(times):
    for number in range(times):
        with ParameterStore.open(path, config) as store:
            if number % 7 == 0:
                store.fetch(["e0"]).release()
cycle(cycles // 4)
before = measure()
cycle(cycles)
after = measure()
print(*before, *after)
"""


@pytest.mark.parametrize(
    ("backend", "cycles"),
    [
        ("uring", 300),
        pytest.param("threads", 1000, marks=pytest.mark.slow),
        pytest.param("pmem", 300, marks=pytest.mark.slow),
    ],
)
def test_opening_a_thousand_times_leaves_nothing(fast_path: Path, backend: str, cycles: int) -> None:
    small_store(fast_path / "s", numel=1500).close()
    done = run_python(CYCLES, fast_path / "s", cycles, backend)
    fds, threads, resident, fds_after, threads_after, resident_after = map(int, done.stdout.split())
    assert (fds_after, threads_after) == (fds, threads)
    # A leak of one page a cycle would be 4 MiB for a thousand.
    assert resident_after - resident < cycles * 2048


# Children ---------------------------------------------------------------------------------------------------

CHILDREN = """
import gc, os, sys
import numpy as np
from tierstore.errors import StoreError, StoreInUseError
from tierstore.store import *
path, config = sys.argv[1], StoreConfig(host_budget=1 << 18)
def in_child(store, ending):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 0
    for use in (lambda: store.fetch(["e0"]), lambda: store.update({}, lr=0.1), store.commit, store.verify):
        try:
            use()
            code = 3
        except StoreError as error:
            code = code or (0 if "fork" in str(error) else 4)
    if ending == "close":
        store.close()
    if ending == "collect":
        del store
        gc.collect()
    if ending == "exit":
        sys.exit(code)  # with all that Python does at its end
    os._exit(code)
with ParameterStore.open(path, config) as store:
    for number in range(12):
        store.update({"e0": np.ones(1500, np.float32)}, lr=0.1)  # in flight while the child runs
        assert in_child(store, ("close", "collect", "exit")[number % 3]) == 0, number
        try:
            ParameterStore.open(path, config)
            sys.exit("a child let the lease go")
        except StoreInUseError:
            pass
        store.commit()
    crc = store.records_crc32c()
with ParameterStore.open(path, config) as store:
    assert (store.last_commit.generation, store.records_crc32c()) == (13, crc)
"""


def test_children_can_neither_use_nor_harm_a_store(fast_path: Path) -> None:
    small_store(fast_path / "s", numel=1500).close()
    run_python(CHILDREN, fast_path / "s")


# Races ------------------------------------------------------------------------------------------------------

RACER = """
import sys
from tierstore.errors import StoreError, StoreExistsError, StoreInUseError
from tierstore.store import *
config = StoreConfig(host_budget=1 << 18, io=IoConfig(compute_threads=1))
print("ready", flush=True)
for line in sys.stdin:
    how, path = line.split()
    try:
        if how == "open":
            store = ParameterStore.open(path, config)
        else:
            store = ParameterStore.create(path, [RecordSchema("expert", 1500)], config)
            store.register("e", "expert")
            store.commit()
    except (StoreInUseError, StoreExistsError) as error:
        print("lost", str(error).replace("\\n", "|"), flush=True)
        sys.stdin.readline()
    except BaseException as error:
        print("failed", repr(error), flush=True)
        sys.stdin.readline()
    else:
        print("won", store.last_commit.generation, flush=True)
        sys.stdin.readline()
        store.close()
    print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["open", "create"])
def test_of_two_that_race_one_wins(fast_path: Path, how: str) -> None:
    small_store(fast_path / "open", numel=1500).close()
    winners = set()
    with child(RACER) as one, child(RACER) as other:
        racers = [one, other]
        assert [racer.answer() for racer in racers] == ["ready", "ready"]
        for number in range(60):
            path = fast_path / ("open" if how == "open" else f"made{number}")
            for racer in racers if number % 2 else racers[::-1]:
                racer.say(f"{how} {path}")
            answers = [racer.answer() for racer in racers]
            won = [a.startswith("won") for a in answers]
            assert sorted(won) == [False, True], answers
            winners.add(won.index(True))
            lost = answers[won.index(False)]
            winner = racers[won.index(True)].pid
            assert f"{path}" in lost, lost
            assert (
                f"pid {winner})" in lost or "there is a store here already" in lost or "pid unknown" in lost
            ), lost
            for racer in racers:
                assert racer.ask("go on") == "done"
        for racer in racers:
            racer.communicate(timeout=30)
            assert racer.returncode == 0


# Little memory ----------------------------------------------------------------------------------------------

BUDGET = """
import sys
import numpy as np
from tierstore.store import *
with ParameterStore.open(sys.argv[1], StoreConfig(host_budget=16 << 20)) as store:
    for step in range(40):
        store.update({key: np.full(20_000, 0.1, np.float32) for key in store.keys[step % 3::3]}, lr=0.1)
        store.commit()
    print(store.records_crc32c())
"""


@pytest.mark.slow
def test_a_store_many_times_its_memory_is_trained_within_a_cgroup(tmp_path: Path) -> None:
    """The group counts the page cache too: direct I/O leaves nothing in it. The kernel kills what does not fit."""
    path = tmp_path / "s"
    small_store(path, count=400, numel=20_000, budget=16 << 20).close()  # 92 MiB of records
    free = run_python(BUDGET, _copy(path, tmp_path / "free"))
    try:
        limit = MemoryLimit(90 << 20)
    except CapabilityError as error:
        pytest.skip(str(error))
    with closing(limit):
        command = ["sh", "-c", 'read go && exec "$@"', "sh", sys.executable, "-c", BUDGET, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
            limit.add(process.pid)
            out, err = process.communicate("go\n", 120)
        assert process.returncode == 0, err
        assert limit.use()["kills_count"] == 0
    assert out == free.stdout


def _copy(path: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", path, to], check=True)
    return to


REFUSED = """
import resource, sys
import psutil
from tierstore.store import *
ParameterStore.open(sys.argv[1], StoreConfig(host_budget=1 << 20)).close()
used = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
before = len(__import__("os").listdir("/proc/self/fd"))
try:
    ParameterStore.open(sys.argv[1], StoreConfig(host_budget=1 << 30))
    sys.exit("opened")
except (MemoryError, OSError) as error:
    print(type(error).__name__, error)
import gc; gc.collect()
assert len(__import__("os").listdir("/proc/self/fd")) == before
# The same process goes on with what it has.
with ParameterStore.open(sys.argv[1], StoreConfig(host_budget=1 << 20)) as store:
    assert store.verify().failures == []
"""


def test_memory_that_is_not_to_be_had_is_one_clear_error(tmp_path: Path) -> None:
    small_store(tmp_path / "s").close()
    done = run_python(REFUSED, tmp_path / "s")
    assert "1073741824" in done.stdout or "1073737728" in done.stdout, done.stdout
    assert "memory" in done.stdout.lower()
