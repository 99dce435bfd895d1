"""What runs in the machine with persistent memory; ``machine.py`` starts it there, as root.

Jobs: ``tests`` (a new DAX file system, the backend's tests and a store on it), ``write`` (records, each acknowledged on
the console when its write has completed, with no sync, until the machine is killed), ``check`` (they are there), and
``write-cached`` and ``check-cached``: the same without DAX, where they must not all be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np

from tierstore import _native as native
from tierstore.store import Capability, IoBackendName, IoConfig, ParameterStore, RecordSchema, StoreConfig

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICE, MOUNT = "/dev/pmem0", Path("/mnt/pmem")
NBYTES, COUNT = 64 << 10, 1024


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def mount(option: str) -> None:
    run("mount", "-t", "ext4", "-o", option, DEVICE, str(MOUNT))


def make_fsdax() -> None:
    """The namespace gets struct pages (in ordinary memory), without which there is no DAX; it remembers."""
    devices, driver = Path("/sys/bus/nd/devices"), Path("/sys/bus/nd/drivers/nd_pmem")
    (driver / "unbind").write_text("namespace0.0")
    pfn = devices / "pfn0.0"
    for name, value in (
        ("mode", "ram"),
        ("align", "2097152"),
        ("uuid", str(uuid.uuid4())),
        ("namespace", "namespace0.0"),
    ):
        (pfn / name).write_text(value)
    (driver / "bind").write_text("pfn0.0")


def pytest(*arguments: str) -> None:
    run(
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        f"--basetemp={MOUNT}/tests",
        f"--rootdir={REPOSITORY}",
        f"-c{REPOSITORY}/pyproject.toml",
        *arguments,
    )


def tests() -> None:
    make_fsdax()
    run("mkfs.ext4", "-q", "-F", "-b", "4096", DEVICE)
    mount("dax=always")
    path = MOUNT / "mode"
    path.write_bytes(bytes(4096))
    with native.File(path, direct=native.DirectIo.OFF) as file:
        reason = file.map_sync_reason()
    print(f"guest: MAP_SYNC {'granted' if not reason else 'refused: ' + reason}", flush=True)
    store()
    names = ("test_io_pmem", "test_engine_transfers", "test_engine_punch", "test_engine_recording")
    pytest(*(str(REPOSITORY / f"tests/native/{name}.py") for name in names), "-k", "pmem")
    print("guest: tests passed", flush=True)


def store() -> None:
    """A store whose extents are persistent memory and nothing else."""
    io = IoConfig(backend=IoBackendName.PMEM, map_sync=Capability.ON)
    config = StoreConfig(host_budget=1 << 20, io=io)
    rng = np.random.default_rng(0)
    with ParameterStore.create(MOUNT / "store", [RecordSchema("expert", 30_000)], config) as opened:
        for number in range(8):
            opened.register(f"e{number}", "expert", weight=rng.standard_normal(30_000).astype(np.float32))
        opened.commit()
        for _ in range(5):
            gradients = {f"e{n}": rng.standard_normal(30_000).astype(np.float32) for n in range(8)}
            opened.update(gradients, lr=1e-2)
        opened.commit()
        expected = opened.records_crc32c()
        print("\n".join(f"guest: {line}" for line in opened.status().effective))
        if "MAP_SYNC: on" not in opened.status().effective:
            raise AssertionError("stores are not durable by themselves")
    with ParameterStore.open(MOUNT / "store", config) as opened:
        if opened.records_crc32c() != expected or opened.verify().failures:
            raise AssertionError("the store is not what it was")


def pattern(number: int) -> bytes:
    return np.random.default_rng(number).bytes(NBYTES)


def write(option: str, map_sync: native.MapSync) -> None:
    """Blocks are allocated on the way: a fault that maps one must make its metadata durable too."""
    mount(option)
    room = native.Buffer(native.Arena(NBYTES, native.HugePages.OFF), [(0, NBYTES)], NBYTES)
    engine = native.Engine(backend=native.IoBackend.PMEM, map_sync=map_sync)
    path = MOUNT / "acknowledged"
    path.unlink(missing_ok=True)
    with native.File(path, create=native.FileCreate.YES, direct=native.DirectIo.OFF) as file:
        file.allocate(0, NBYTES * COUNT)
        engine.wait(engine.sync(file))  # its name and length
        run("sync")
        for number in range(COUNT):
            room.array()[:] = np.frombuffer(pattern(number), np.uint8)
            engine.wait(engine.write(file, number * NBYTES, [room]))
            print(f"ACK {number}", flush=True)
    print("guest: nobody killed the machine")


def check(option: str) -> None:
    mount(option)
    found = (MOUNT / "acknowledged").read_bytes()
    whole = [found[n * NBYTES : (n + 1) * NBYTES] == pattern(n) for n in range(COUNT)]
    print(f"WHOLE {''.join('01'[one] for one in whole)}")


JOBS = {
    "tests": tests,
    "write": lambda: write("dax=always", native.MapSync.ON),
    "check": lambda: check("dax=always"),
    "write-cached": lambda: write("dax=never", native.MapSync.OFF),
    "check-cached": lambda: check("dax=never"),
}

if __name__ == "__main__":
    os.chdir("/tmp")  # the only place that can be written
    print(flush=True)  # ends the line with the firmware's escape codes
    JOBS[sys.argv[1]]()
