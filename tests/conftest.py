"""What every test runs under, and real ranks for those that need several."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. Many tests start processes of their own: one thread each, and no spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What this user's disks were found to do best is nobody's business here.
os.environ["TIERSTORE_IO_PROFILE"] = "none"
# Those processes find the installed package, not the checkout that pytest was called from.
os.environ.setdefault("PYTHONSAFEPATH", "1")
# Ranks meet on this machine alone, whatever its name resolves to.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# A shell starts what it puts in the background with interrupts ignored, and so would be what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes, or how long it takes to draw one, is the machine's. .ci/run asks for `thorough`.
slow = [HealthCheck.too_slow]
settings.register_profile("quick", max_examples=20, deadline=None, suppress_health_check=slow)
settings.register_profile("thorough", max_examples=100, deadline=None, suppress_health_check=slow)
settings.load_profile("quick")

if TYPE_CHECKING:
    from forked_python import ForkServer
    from launcher import Ranks


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """All tests run in a process for each core, at most eight, of up to 1 GiB each; tests that are named, in this one."""
    from tierstore.machine import cores  # the environment above comes first

    whole = config.args == config.getini("testpaths")
    return min(cores(), 8) if whole else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Garbage collections leave out what is imported by then: half a second each, some hundred times in a run."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


@pytest.fixture(scope="session", autouse=True)
def directories_of_torch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Logs of ``torchrun`` and compiled code: torch would leave both in the system's temporary directory."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchrun"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("torchinductor"))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever a test before has left: on several threads torch's gradient of an index is a sum in any order."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Forks Python processes that have imported torch: see ``tests/forked_python.py``."""
    from forked_python import ForkServer

    with ForkServer() as server:
        yield server


@pytest.fixture
def forked_python(fork_server: ForkServer) -> Iterator[None]:
    """The Python processes that a test starts are forked. Not for tests of imports, memory or the interpreter's end."""
    with fork_server.forking():
        yield


_STARTED = pytest.StashKey["Ranks"]()


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config, fork_server: ForkServer) -> Iterator[Ranks]:
    """Worlds of real processes on Gloo: see ``tests/parallel/launcher.py``."""
    from launcher import Ranks

    started = pytestconfig.stash[_STARTED] = Ranks(fork_server)
    yield started
    started.close()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Worlds of ranks poll their sockets as long as they are kept: a directory's end with it."""
    if nextitem is not None and nextitem.path.parent != item.path.parent and _STARTED in item.config.stash:
        item.config.stash[_STARTED].rest()


@pytest.fixture(scope="session")
def simulated_ranks(fork_server: ForkServer) -> Iterator[Ranks]:
    """As ``ranks``, with simulated devices: see ``tests/simgpu/simulated.py``."""
    from launcher import Ranks
    from simulated_build import build

    started = Ranks(fork_server, build())
    yield started
    started.close()


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 kB of words in an order that is not quite random."""
    import numpy as np  # the environment above comes first

    generator = np.random.default_rng(5)
    words = np.array(["store", "tier", "expert", "page", "evict", "fetch", "slot", "step", "layer", "record"])
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words[generator.zipf(1.3, 11_000) % len(words)]))
    return path


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for tests that open stores a thousand times."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(dir=shared, prefix="tierstore-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the profile of disks is, which nothing has written yet."""
    path = tmp_path / "state/profile.json"
    monkeypatch.setenv("TIERSTORE_IO_PROFILE", str(path))
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 16 MiB."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("mounting a file system needs root; the tests with a limited file size run everywhere")
    image, mount = tmp_path / "disk", tmp_path / "mount"
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    mount.mkdir()
    made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], capture_output=True, check=False)
    mounted = made.returncode == 0 and (
        subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True, check=False).returncode
        == 0
    )
    if not mounted:
        pytest.skip("no loop-mounted ext4 here; the tests with a limited file size run everywhere")
    yield mount
    subprocess.run(["umount", mount], check=True)
