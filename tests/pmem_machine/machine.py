"""The PMem backend on a real DAX file system, in an emulated machine with an NVDIMM. Opt-in, not part of the suite.

    apt-get install qemu-system-x86 e2fsprogs     # Debian; the extension is built
    python tests/pmem_machine/machine.py

A Debian kernel and a static busybox are downloaded and unpacked (not installed) in ``build/pmem-machine``. The machine sees
this one's files read-only over 9p, and ``/dev/pmem0``, whose content is a file here, with ext4 on it, mounted with
``dax=always``. What is shown:

1. MAP_SYNC is granted, and the backend's tests and a store pass on that file system.
2. Writes that have completed, without any sync, are all there after the machine was killed (SIGKILL) and booted again;
   blocks were allocated on the way. The same with a page cache in between loses some: the check can fail.

What is not shown: that the cache lines were written back (``clwb``, ``sfence``). The NVDIMM is memory of this machine, which
keeps every store however it is made. Only a real one that loses its power can tell.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MODULES = (
    "9pnet_virtio",
    "9p",
    "virtio_pci",
    "nfit",
    "nd_pmem",
    "dax_pmem",
    "ext4",
    "crc32c_generic",
    "crc32c-intel",
)
PMEM_BYTES = 512 << 20
ACKNOWLEDGED = 200  # writes before the machine is killed
TIMEOUT_S = 900


class Kernel:
    """A Debian kernel and an initial file system, made in ``directory``; what runs it."""

    def __init__(self, directory: Path, accelerator: str) -> None:
        self.accelerator = accelerator
        self._directory = directory
        self._root = directory / "root"
        directory.mkdir(parents=True, exist_ok=True)
        if not (self._root / "boot").is_dir():
            self._unpack()
        self.image = next((self._root / "boot").glob("vmlinuz-*"))
        self._version = self.image.name.removeprefix("vmlinuz-")
        self.initial = self._make_initial()

    def _unpack(self) -> None:
        depends = subprocess.run(
            ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=True
        ).stdout
        package = next(line.split()[1] for line in depends.splitlines() if "Depends:" in line)
        subprocess.run(["apt-get", "download", package, "busybox-static"], cwd=self._directory, check=True)
        for found in self._directory.glob("*.deb"):
            subprocess.run(["dpkg", "-x", found, self._root], check=True)

    def _order(self) -> list[Path]:
        """The modules' files, each after those that it needs."""
        modules = self._root / "lib/modules" / self._version
        busybox = self._root / "bin/busybox"
        subprocess.run([busybox, "depmod", "-b", self._root, self._version], check=True)
        needs = {}
        for line in (modules / "modules.dep").read_text().splitlines():
            path, _, others = line.partition(":")
            needs[path] = others.split()
        by_name = {Path(path).name.removesuffix(".ko"): path for path in needs}
        order: list[str] = []

        def add(path: str) -> None:
            for other in needs[path]:
                add(other)
            if path not in order:
                order.append(path)

        for name in MODULES:
            if name in by_name:
                add(by_name[name])
        return [modules / path for path in order]

    def _make_initial(self) -> Path:
        tree = self._directory / "initial"
        shutil.rmtree(tree, ignore_errors=True)
        for name in ("bin", "proc", "sys", "dev", "host", "modules"):
            (tree / name).mkdir(parents=True)
        shutil.copy(self._root / "bin/busybox", tree / "bin/busybox")
        shutil.copy(HERE / "init", tree / "init")
        (tree / "init").chmod(0o755)
        order = self._order()
        for module in order:
            shutil.copy(module, tree / "modules")
        (tree / "modules/order").write_text("".join(f"{module.name}\n" for module in order))
        names = "\n".join(str(path.relative_to(tree)) for path in sorted(tree.rglob("*")))
        made = subprocess.run(
            [self._root / "bin/busybox", "cpio", "-o", "-H", "newc"],
            input=names.encode(),
            cwd=tree,
            capture_output=True,
            check=True,
        )
        target = self._directory / "initial.cpio"
        target.write_bytes(made.stdout)
        return target


def boot(kernel: Kernel, memory: Path, job: str, *, kill_after: int | None = None) -> list[str]:
    """Runs ``job`` in the machine; returns what its console said. ``kill_after``: acknowledged writes until SIGKILL."""
    append = (
        f"console=ttyS0 no_timer_check quiet panic=-1 job={job} python={sys.executable} "
        f"repository={REPOSITORY} rdinit=/init"
    )
    command = [
        "qemu-system-x86_64", "-machine", f"pc,accel={kernel.accelerator},nvdimm=on", "-cpu", "max", "-smp", "2",
        "-m", "2G,slots=2,maxmem=8G", "-nographic", "-no-reboot", "-nodefaults", "-serial", "stdio",
        "-object", f"memory-backend-file,id=mem,share=on,pmem=off,mem-path={memory},size={PMEM_BYTES}",
        "-device", "nvdimm,id=nvdimm,memdev=mem",
        "-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap",
        "-kernel", str(kernel.image), "-initrd", str(kernel.initial), "-append", append,
    ]  # fmt: skip
    said: list[str] = []
    machine = subprocess.Popen(
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace"
    )
    signal.alarm(TIMEOUT_S)
    try:
        for line in machine.stdout:
            said.append(line.strip())
            if not line.startswith(("ACK", "WHOLE")):
                print(f"  | {line.rstrip()}", flush=True)
            if kill_after is not None and sum(one.startswith("ACK") for one in said) >= kill_after:
                machine.kill()
                kill_after = None
    finally:
        signal.alarm(0)
        machine.kill()
        machine.wait()
    return said


def survivors(kernel: Kernel, memory: Path, suffix: str) -> tuple[int, int]:
    """Acknowledged writes, and how many of them are whole after a kill and another boot."""
    said = boot(kernel, memory, f"write{suffix}", kill_after=ACKNOWLEDGED)
    acknowledged = [int(line.split()[1]) for line in said if line.startswith("ACK")]
    said = boot(kernel, memory, f"check{suffix}")
    whole = next((line.split()[1] for line in said if line.startswith("WHOLE")), None)
    if whole is None:
        sys.exit("the check did not run")
    return len(acknowledged), sum(whole[number] == "1" for number in acknowledged)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, default=REPOSITORY / "build/pmem-machine")
    parser.add_argument(
        "--accelerator", choices=("tcg", "kvm"), default="tcg", help="kvm is faster where it works"
    )
    options = parser.parse_args()
    directory = options.directory.absolute()
    if shutil.which("qemu-system-x86_64") is None:
        sys.exit("needs qemu-system-x86_64 (apt-get install qemu-system-x86)")
    kernel, memory = Kernel(directory, options.accelerator), directory / "memory"
    memory.unlink(missing_ok=True)
    with open(memory, "wb") as file:
        file.truncate(PMEM_BYTES)
    said = boot(kernel, memory, "tests")
    if "guest: MAP_SYNC granted" not in said or "guest: tests passed" not in said:
        sys.exit("failed: see above")
    acknowledged, whole = survivors(kernel, memory, "")
    print(f"killed with DAX and MAP_SYNC: {acknowledged} writes acknowledged, {whole} of them whole")
    cached, kept = survivors(kernel, memory, "-cached")
    print(f"killed with a page cache, no sync: {cached} writes done, {kept} of them whole")
    if whole != acknowledged or acknowledged < ACKNOWLEDGED:
        sys.exit("failed: an acknowledged write is gone")
    if kept == cached:
        sys.exit("failed: the page cache kept everything, so the check shows nothing")
    print("passed")


if __name__ == "__main__":
    main()
