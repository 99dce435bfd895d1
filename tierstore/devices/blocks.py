"""Which disks lie under a directory: through mounts, partitions, loop files, device mapper and RAID.

All of it is read from ``/proc/self/mountinfo`` and ``/sys``, and needs no rights.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tierstore.capabilities import kernel_text, unescaped

_PROC = Path("/proc")
_SYS = Path("/sys")
_SECTOR = 512  # the unit of sizes in /sys, whatever a disk's own is
#: Where a disk hangs, by a piece of its path in /sys; the first that is found.
_BUSES = ("virtio", "nvme", "usb", "ata", "scsi", "xen", "mmc")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A whole disk. ``through``: what lies between it and the file system (``vda1``, ``dm-0``), the nearest first.

    ``rotational`` is None where the kernel does not say; ``bus`` is empty where it is none that is known.
    """

    name: str
    through: tuple[str, ...]
    model: str
    rotational: bool | None
    size_bytes: int
    bus: str

    @property
    def kind(self) -> str:
        """The medium in words."""
        if self.bus == "virtio":
            return "virtual disk"
        if self.rotational is None:
            return "unknown"
        return "hard disk" if self.rotational else f"{'NVMe ' * (self.bus == 'nvme')}SSD"


def disks_under(directory: Path, *, proc: Path = _PROC, sys: Path = _SYS) -> list[Disk]:
    """The disks that a file in ``directory`` lies on, several for a RAID; none for what has no block device (tmpfs, NFS).

    Raises OSError, naming it, where there is no such directory.
    """
    number = os.stat(directory).st_dev
    entry = _entry(f"{os.major(number)}:{os.minor(number)}", proc, sys)
    return [] if entry is None else _disks(entry, (), proc, sys)


def _entry(number: str, proc: Path, sys: Path) -> Path | None:
    """The directory in /sys of a device number. A file system may have a number of its own (btrfs): then it is the device
    that was mounted."""
    entry = sys / "dev/block" / number
    if entry.exists():
        return entry.resolve()
    source = _source(number, proc)
    if source is None:
        return None
    entry = sys / "class/block" / Path(os.path.realpath(source)).name
    return entry.resolve() if entry.exists() else None


def _source(number: str, proc: Path) -> str | None:
    """What was mounted as device ``number``, if it is a path under /dev."""
    for line in kernel_text(proc / "self/mountinfo").split("\n"):
        mount, _, origin = line.partition(" - ")
        fields, parts = mount.split(), origin.split()
        if len(fields) > 2 and len(parts) > 1 and fields[2] == number and parts[1].startswith("/dev/"):
            return unescaped(parts[1])
    return None


def _disks(entry: Path, through: tuple[str, ...], proc: Path, sys: Path) -> list[Disk]:
    if (entry / "partition").exists():
        return _disks(entry.parent, (*through, entry.name), proc, sys)
    slaves = sorted(entry.glob("slaves/*"))
    if slaves:
        inner = (*through, entry.name)
        return [disk for slave in slaves for disk in _disks(slave.resolve(), inner, proc, sys)]
    backing = kernel_text(entry / "loop/backing_file")
    if backing:
        with contextlib.suppress(OSError):
            number = os.stat(backing).st_dev
            below = _entry(f"{os.major(number)}:{os.minor(number)}", proc, sys)
            if below is not None and below != entry:
                return _disks(below, (*through, entry.name), proc, sys)
    return [_disk(entry, through)]


def _disk(entry: Path, through: tuple[str, ...]) -> Disk:
    rotational = kernel_text(entry / "queue/rotational")
    sectors = kernel_text(entry / "size")
    pieces = str(entry)
    return Disk(
        name=entry.name,
        through=through,
        model=" ".join(kernel_text(entry / "device/model").split()),
        rotational=rotational == "1" if rotational in ("0", "1") else None,
        size_bytes=int(sectors) * _SECTOR if sectors.isdigit() else 0,
        bus=next((bus for bus in _BUSES if f"/{bus}" in pieces), ""),
    )
