"""The disks under a directory, and the health that they report.

Disks are found through mounts, partitions, loop files, device mapper and RAID, read from ``/proc/self/mountinfo`` and
``/sys``, which needs no privileges.

Health: an NVMe controller is queried directly (Get Log Page 02h, *SMART / Health Information*; NVM Express Base
Specification 2.0, figure 207), which needs permission to open ``/dev/nvmeN``. Where that is refused, and for SATA and
SAS, ``smartctl --json`` and ``nvme smart-log`` are run, if they are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierstore.capabilities import kernel_text, mounts

_PROC = Path("/proc")
_SYS = Path("/sys")
_SECTOR = 512  # the unit of sizes in /sys, whatever the disk's sector size
#: Buses, recognised by a part of the disk's path in /sys; the first match is taken.
_BUSES = ("virtio", "nvme", "usb", "ata", "scsi", "xen", "mmc")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A whole disk. ``through``: the devices between it and the file system (``vda1``, ``dm-0``), nearest first.

    ``rotational`` is None where the kernel does not say; ``bus`` is empty if it is unknown.
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
    """The disks that hold a file in ``directory``: several for a RAID, none without a block device (tmpfs, NFS).

    Raises OSError, naming the directory, if it does not exist.
    """
    number = os.stat(directory).st_dev
    entry = _entry(f"{os.major(number)}:{os.minor(number)}", proc, sys)
    return [] if entry is None else _disks(entry, (), proc, sys)


def _entry(number: str, proc: Path, sys: Path) -> Path | None:
    """The /sys directory of a device number; of the mounted device if a file system has its own number (btrfs)."""
    entry = sys / "dev/block" / number
    if entry.exists():
        return entry.resolve()
    sources = (mount.source for mount in mounts(proc) if mount.number == number)
    source = next((name for name in sources if name.startswith("/dev/")), None)
    if source is None:
        return None
    entry = sys / "class/block" / Path(os.path.realpath(source)).name
    return entry.resolve() if entry.exists() else None


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


_DEV = Path("/dev")
_PAGE_BYTES = 512
_DATA_UNIT = 1000 * 512  # bytes: the log counts thousands of 512-byte blocks
_KELVIN = 273
_TIMEOUT_S = 5
_ADMIN_COMMAND = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD: _IOWR('N', 0x41, 72 bytes)
#: struct nvme_admin_cmd of <linux/nvme_ioctl.h>: opcode, nsid, addr, data_len, cdw10, timeout_ms; the rest is 0.
_COMMAND = struct.Struct("=B3xI16xQ4xII20xI4x")
_GET_LOG_PAGE = 0x02
_HEALTH_PAGE = 0x02
_ALL_NAMESPACES = 0xFFFFFFFF
#: Meanings of the log's critical warning bits, from bit 0.
_WARNINGS = (
    "its spare capacity is below the threshold",
    "its temperature is out of range",
    "its reliability is degraded by media errors",
    "it has gone read-only",
    "the backup of its volatile memory has failed",
    "its persistent memory region is read-only or unreliable",
)
#: Attributes of SATA SSDs whose normalized value counts down from 100 as the flash wears, by vendor.
_ATA_LIFE = (231, 233, 177, 173, 202)
_ATA_LBAS_WRITTEN = 241


@dataclass(frozen=True, kw_only=True)
class Health:
    """What a disk reports; None: not reported. ``warnings``: reasons to replace it. ``reason``: why nothing is known; empty
    if something is.
    """

    warnings: tuple[str, ...] = ()
    used_percent: int | None = None
    spare_percent: int | None = None
    written_bytes: int | None = None
    media_errors: int | None = None
    temperature_celsius: int | None = None
    reason: str = ""

    def __str__(self) -> str:
        """One line for a table."""
        if self.reason:
            return self.reason
        facts = [
            (self.used_percent, "{}% of its endurance used"),
            (self.spare_percent, "{}% spare"),
            (None if self.written_bytes is None else f"{self.written_bytes / 1e12:.1f}", "{} TB written"),
            (self.media_errors or None, "{} media errors"),
            (self.temperature_celsius, "{} °C"),
        ]
        said = [text.format(value) for value, text in facts if value is not None]
        return ", ".join([*(f"WARNING: {warning}" for warning in self.warnings), *said]) or "passed"


def disk_health(disk: Disk, *, sys: Path = _SYS, dev: Path = _DEV) -> Health:
    """The health of ``disk``, from the first source that answers."""
    if disk.bus == "virtio":
        return Health(reason="not offered by virtio")
    asked: list[Callable[[], Health]] = []
    controller = _controller(disk, sys)
    if controller:
        asked.append(lambda: parse_health_page(_read_page(dev / controller)))
    if shutil.which("smartctl"):
        asked.append(lambda: parse_smartctl(_run("smartctl", "--json", "-H", "-A", str(dev / disk.name))))
    if controller and shutil.which("nvme"):
        asked.append(lambda: parse_nvme(_run("nvme", "smart-log", "-o", "json", str(dev / controller))))
    refused = [] if asked else ["smartctl is not installed"]
    for ask in asked:
        try:
            return ask()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            refused.append(str(error))
        except (LookupError, TypeError, AttributeError) as error:
            # An unknown version of a tool must not keep a run from starting.
            refused.append(f"unknown output: {error!r}")
    return Health(reason=f"not known: {'; '.join(refused)}")


def _controller(disk: Disk, sys: Path) -> str:
    """The name of the NVMe controller of a disk's namespace; empty for other disks."""
    if not re.fullmatch(r"nvme\d+n\d+", disk.name):
        return ""
    device = (sys / "class/block" / disk.name / "device").resolve()
    # With multipath, a namespace belongs to a subsystem, whose controllers are below it.
    for candidate in (device, *sorted(device.glob("nvme*"))):
        if re.fullmatch(r"nvme\d+", candidate.name):
            return candidate.name
    return disk.name.rpartition("n")[0]


def _read_page(controller: Path) -> bytes:
    """Read the health log page. Raises OSError naming the controller, also if the command ends with an error status."""
    page = ctypes.create_string_buffer(_PAGE_BYTES)
    cdw10 = (_PAGE_BYTES // 4 - 1) << 16 | _HEALTH_PAGE
    address, timeout_ms = ctypes.addressof(page), _TIMEOUT_S * 1000
    command = bytearray(
        _COMMAND.pack(_GET_LOG_PAGE, _ALL_NAMESPACES, address, _PAGE_BYTES, cdw10, timeout_ms)
    )
    fd = os.open(controller, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = fcntl.ioctl(fd, _ADMIN_COMMAND, command)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(controller)) from error
    finally:
        os.close(fd)
    if status:
        raise OSError(f"{controller}: Get Log Page ended with NVMe status {status:#x}")
    return page.raw


def parse_health_page(page: bytes) -> Health:
    """Parse the health log page, 512 bytes. Raises ValueError for another length."""
    if len(page) != _PAGE_BYTES:
        raise ValueError(f"a health log page has {_PAGE_BYTES} bytes, not {len(page)}")

    def number(offset: int, nbytes: int) -> int:
        return int.from_bytes(page[offset : offset + nbytes], "little")

    kelvin = number(1, 2)
    return Health(
        warnings=_critical(page[0]),
        used_percent=page[5],
        spare_percent=page[3],
        written_bytes=number(48, 16) * _DATA_UNIT,
        media_errors=number(160, 16),
        temperature_celsius=kelvin - _KELVIN if kelvin else None,
    )


def _critical(bits: int) -> tuple[str, ...]:
    known = tuple(text for bit, text in enumerate(_WARNINGS) if bits >> bit & 1)
    unknown = bits >> len(_WARNINGS)
    return (*known, f"critical warning {bits:#04x}") if unknown else known


def parse_smartctl(text: str) -> Health:
    """Parse the output of ``smartctl --json -H -A`` for NVMe, SATA or SAS. Raises ValueError if it has no health status."""
    found = _object(text)
    log = found.get("nvme_smart_health_information_log")
    if isinstance(log, Mapping):
        return Health(
            warnings=_critical(int(log.get("critical_warning", 0))),
            used_percent=_whole(log, "percentage_used"),
            spare_percent=_whole(log, "available_spare"),
            written_bytes=_units(log, "data_units_written"),
            media_errors=_whole(log, "media_errors"),
            temperature_celsius=_whole(log, "temperature"),
        )
    passed = found.get("smart_status", {}).get("passed")
    if passed is None:
        messages = found.get("smartctl", {}).get("messages", [])
        said = "; ".join(str(message.get("string")) for message in messages)
        raise ValueError(f"smartctl: {said or 'no health status'}")
    table = {row["id"]: row for row in found.get("ata_smart_attributes", {}).get("table", [])}
    life = next((int(table[number]["value"]) for number in _ATA_LIFE if number in table), None)
    written = table.get(_ATA_LBAS_WRITTEN, {}).get("raw", {}).get("value")
    return Health(
        warnings=() if passed else ("it says that it is failing",),
        used_percent=None if life is None else max(100 - life, 0),
        written_bytes=None if written is None else int(written) * int(found.get("logical_block_size", 512)),
        temperature_celsius=_whole(found.get("temperature", {}), "current"),
    )


def parse_nvme(text: str) -> Health:
    """Parse the output of ``nvme smart-log -o json``. Raises ValueError if it is no health log."""
    log = _object(text)
    if "critical_warning" not in log:
        raise ValueError("nvme: not a health log")
    warning = log["critical_warning"]
    kelvin = _whole(log, "temperature")
    return Health(
        warnings=_critical(int(warning["value"] if isinstance(warning, Mapping) else warning)),
        used_percent=_whole(log, "percent_used"),
        spare_percent=_whole(log, "avail_spare"),
        written_bytes=_units(log, "data_units_written"),
        media_errors=_whole(log, "media_errors"),
        temperature_celsius=kelvin - _KELVIN if kelvin else None,
    )


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def _whole(table: Mapping[str, Any], key: str) -> int | None:
    # nvme prints numbers above 64 bits, and in some versions all large numbers, as text with separators.
    value = table.get(key)
    return None if value is None else int(str(value).replace(",", ""))


def _units(table: Mapping[str, Any], key: str) -> int | None:
    units = _whole(table, key)
    return None if units is None else units * _DATA_UNIT


def _run(*command: str) -> str:
    # smartctl's exit status is a set of bits, most of them about the disk: only its output counts.
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    return done.stdout
