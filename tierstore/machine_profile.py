"""How long operations take: alpha-beta models (latency + bytes / bandwidth), the machine profile that holds them, and
the I/O profile of its disks.

PipeMoE (section 3.2) models collectives like this; computation is modelled alike, by floating point operations instead
of bytes. ``tierstore bench machine`` measures a profile with the engine and the collectives that a run uses. Without
one, the figures of ``ASSUMED`` are used, and predictions made from them say so.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from tierstore.errors import DataError
from tierstore.links import LinkConfig
from tierstore.machine import MemoryAccount, block_device, disk
from tierstore.outputs import OutputKind, write_output
from tierstore.stats import median_line

PROFILE_VERSION = 1


class Evidence(StrEnum):
    """Where a number comes from: every figure of a plan carries it. ``FORMULA`` is exact arithmetic on the configuration,
    ``ASSUMED`` a default that was not measured here.
    """

    MEASURED = "measured"
    FORMULA = "formula"
    ASSUMED = "assumed"

    def weaker(self, other: Evidence) -> Evidence:
        """The evidence of a figure made of both: the weaker of the two."""
        order = (Evidence.FORMULA, Evidence.MEASURED, Evidence.ASSUMED)
        return max(self, other, key=order.index)


@dataclass(frozen=True, slots=True)
class Cost:
    """``latency_s + amount / per_s``. An amount of 0 costs nothing; ``amount`` is bytes, or floating point operations."""

    latency_s: float
    per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise DataError(f"latency_s: expected at least 0 seconds, got {self.latency_s}")
        if not self.per_s > 0:
            raise DataError(f"per_s: expected more than 0, got {self.per_s}")

    def seconds(self, amount: float) -> float:
        return self.latency_s + amount / self.per_s if amount > 0 else 0.0

    def slower(self, other: Cost, amount: float) -> float:
        """Seconds until both have ended, as on a limited link."""
        return max(self.seconds(amount), other.seconds(amount))


def over_link(cost: Cost, link: LinkConfig) -> Cost:
    """``cost`` over ``link``: the larger latency, and the lower rate."""
    return Cost(max(cost.latency_s, link.latency), min(cost.per_s, link.bandwidth or math.inf))


def fit_cost(amounts: Sequence[float], seconds: Sequence[float]) -> Cost:
    """The line through the medians of measurements (Theil-Sen); up to 29% of outliers do not move it. Needs two different
    amounts. A slope that is not positive (all latency) becomes an infinite rate, a negative latency 0.
    """
    medians = _medians(amounts, seconds)
    if len(medians) < 2:
        raise ValueError(f"a line needs two different amounts, got {sorted(medians)}")
    slope, latency = median_line(list(medians), list(medians.values()))
    if slope <= 0:
        slope, latency = 0.0, float(np.median(list(medians.values())))
    return Cost(max(latency, 0.0), 1 / slope if slope > 0 else math.inf)


def fit_errors(cost: Cost, amounts: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """The relative error of ``cost`` against the median of the ``seconds`` of each amount, by amount."""
    return [abs(cost.seconds(amount) / median - 1) for amount, median in _medians(amounts, seconds).items()]


def _medians(amounts: Sequence[float], seconds: Sequence[float]) -> dict[float, float]:
    """The median of the ``seconds`` of each amount, ascending by amount."""
    points: dict[float, list[float]] = {}
    for amount, spent in zip(amounts, seconds, strict=True):
        points.setdefault(amount, []).append(spent)
    return {amount: float(np.median(found)) for amount, found in sorted(points.items())}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The costs of a machine. Collectives are by the bytes that one rank sends, ``disk_*`` for one transfer among many,
    ``adamw`` by the bytes that a step touches, ``*_flops`` by floating point operations.

    Older profiles lack the last three: ``exchanges`` are all-to-alls by the number of ranks, ``expert_forward`` and
    ``expert_backward`` the products of one expert by their floating point operations.
    """

    evidence: Evidence
    machine: str
    ranks: int
    process_bytes: int
    gather: Cost
    reduce_scatter: Cost
    all_to_all: Cost
    disk_read: Cost
    disk_write: Cost
    disk_mixed: Cost
    copy: Cost
    adamw: Cost
    dense_flops: Cost
    expert_flops: Cost
    exchanges: Mapping[int, Cost] = field(default_factory=dict)
    expert_forward: Cost | None = None
    expert_backward: Cost | None = None

    def exchange(self, ranks: int) -> Cost:
        """The cost of an all-to-all of ``ranks``: as measured, else with the next lower number, else ``all_to_all``."""
        lower = [count for count in self.exchanges if count <= ranks]
        return self.exchanges[max(lower)] if lower else self.all_to_all


#: The costs that are assumed where nothing was measured.
ASSUMED = Profile(
    evidence=Evidence.ASSUMED,
    machine="no profile",
    ranks=2,
    process_bytes=330 << 20,
    gather=Cost(2e-4, 2e9),
    reduce_scatter=Cost(2e-4, 2e9),
    all_to_all=Cost(2e-4, 2e9),
    disk_read=Cost(1e-4, 2e9),
    disk_write=Cost(1e-4, 1e9),
    disk_mixed=Cost(1e-4, 1.5e9),
    copy=Cost(1e-5, 8e9),
    adamw=Cost(1e-5, 1e10),
    dense_flops=Cost(1e-4, 5e10),
    expert_flops=Cost(1e-4, 5e10),
)


@dataclass(frozen=True, slots=True)
class _DataSheet:
    """What a maker states of a GPU: floating point operations a second of dense 16-bit products that are summed in fp32, and
    bytes a second in one direction to the host and to another GPU.
    """

    flops: float
    host: float
    peer: float


_NVLINK_2, _NVLINK_3, _NVLINK_4 = 150e9, 300e9, 450e9  # all links of a GPU, in one direction
_PCIE_3, _PCIE_4, _PCIE_5 = 16e9, 32e9, 64e9  # 16 lanes
#: By NVIDIA's data sheets and architecture papers. GPUs for desktops reach each other over PCIe.
_DATA_SHEETS = {
    "V100": _DataSheet(125e12, _PCIE_3, _NVLINK_2),
    "A100": _DataSheet(312e12, _PCIE_4, _NVLINK_3),
    "H100": _DataSheet(989.5e12, _PCIE_5, _NVLINK_4),
    "H200": _DataSheet(989.5e12, _PCIE_5, _NVLINK_4),
    "RTX2080Ti": _DataSheet(53.8e12, _PCIE_3, _PCIE_3),
    "RTX3090": _DataSheet(71e12, _PCIE_4, _PCIE_4),
    "RTX4090": _DataSheet(165.2e12, _PCIE_4, _PCIE_4),
}
_REACHED_FLOPS, _REACHED_BYTES = 0.4, 0.8  # shares of what is stated that training reaches: assumed
_HOST_MEMORY = 200e9  # eight channels of DDR4-3200
_DRIVE_READ, _DRIVE_WRITE = 7e9, 5e9  # one drive on PCIe 4


def check_process_memory(memory: int) -> None:
    """Raise BudgetError if ``memory`` (bytes; 0: not given) is less than a process takes that has imported torch.

    Commands call this before they import torch: in a cgroup of that size, the import would be killed.
    """
    if memory:
        MemoryAccount({"process": ASSUMED.process_bytes}).check(memory)


def find_profile(named: Path) -> Profile:
    """The profile in the file ``named``, or of the GPU of this name, by its data sheet. Raises DataError that lists
    the names, OSError.
    """
    sheet = _DATA_SHEETS.get(str(named))
    if named.exists() or sheet is None:
        try:
            return load_profile(named)
        except FileNotFoundError as error:
            known = ", ".join(_DATA_SHEETS)
            raise DataError(f"{named}: expected a machine profile, or the name of a GPU: {known}") from error
    host, peer, drive = (_REACHED_BYTES * rate for rate in (sheet.host, sheet.peer, _DRIVE_READ))
    collective, products = Cost(2e-5, peer), Cost(1e-5, _REACHED_FLOPS * sheet.flops)
    written = _REACHED_BYTES * _DRIVE_WRITE
    return replace(
        ASSUMED,
        machine=f"{named} by its data sheet ({_REACHED_FLOPS:.0%} of its operations, {_REACHED_BYTES:.0%} of its links), "
        "one drive",
        gather=collective,
        reduce_scatter=collective,
        all_to_all=collective,
        disk_read=Cost(1e-4, drive),
        disk_write=Cost(1e-4, written),
        disk_mixed=Cost(1e-4, (drive + written) / 2),
        copy=Cost(1e-5, host),
        adamw=Cost(1e-5, _REACHED_BYTES * _HOST_MEMORY),
        dense_flops=products,
        expert_flops=products,
    )


_COSTS = tuple(f.name for f in fields(Profile) if isinstance(getattr(ASSUMED, f.name), Cost))
_LATER_COSTS = ("expert_forward", "expert_backward")
_LATER = {f.name for f in fields(Profile) if f.default is not MISSING or f.default_factory is not MISSING}


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` as JSON. Raises OSError."""
    plain = {name: value for name, value in asdict(profile).items() if name not in _LATER or value}
    for costs in (plain, plain.get("exchanges", {})):
        for cost in costs.values():
            if isinstance(cost, dict) and not math.isfinite(cost.get("per_s", 0.0)):
                cost["per_s"] = None
    text = json.dumps({"profile_version": PROFILE_VERSION, **plain}, indent=2, allow_nan=False)
    write_output(path, OutputKind.PROFILE, text + "\n")


def load_profile(path: Path) -> Profile:
    """The inverse of ``save_profile``. Raises DataError naming the file and the key, OSError."""
    plain = _read(path, "a machine profile")
    if not isinstance(plain, dict) or plain.get("profile_version") != PROFILE_VERSION:
        found = plain.get("profile_version") if isinstance(plain, dict) else None
        raise DataError(f"{path}: expected a machine profile of version {PROFILE_VERSION}, got {found!r}")
    known = {f.name for f in fields(Profile)}
    given = set(plain) - {"profile_version"}
    if wrong_keys := (given - known) | (known - _LATER - given):
        wrong = min(wrong_keys)
        raise DataError(
            f"{path}: {wrong}: {'unknown' if wrong in given else 'missing'} key of a machine profile"
        )
    return Profile(
        evidence=_evidence(path, plain["evidence"]),
        machine=str(plain["machine"]),
        ranks=_whole(path, "ranks", plain["ranks"]),
        process_bytes=_whole(path, "process_bytes", plain["process_bytes"]),
        exchanges=_exchanges(path, plain.get("exchanges", {})),
        **{name: _cost(path, name, plain[name]) for name in (*_COSTS, *_LATER_COSTS) if name in plain},
    )


def _read(path: Path, what: str) -> object:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: not {what}: not JSON: {error}") from error


def _evidence(path: Path, value: object) -> Evidence:
    try:
        return Evidence(str(value))
    except ValueError as error:
        raise DataError(f"{path}: evidence: expected one of {', '.join(Evidence)}, got {value!r}") from error


def _whole(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{path}: {name}: expected a whole number of at least 1, got {value!r}")
    return value


def _exchanges(path: Path, value: object) -> dict[int, Cost]:
    if not isinstance(value, Mapping) or not all(ranks.isdigit() and int(ranks) > 1 for ranks in value):
        raise DataError(f"{path}: exchanges: expected costs by numbers of ranks, got {value!r}")
    return {int(ranks): _cost(path, f"exchanges.{ranks}", cost) for ranks, cost in value.items()}


def _cost(path: Path, name: str, value: object) -> Cost:
    if not isinstance(value, Mapping) or set(value) != {"latency_s", "per_s"}:
        raise DataError(f"{path}: {name}: expected latency_s and per_s, got {value!r}")
    rate = math.inf if value["per_s"] is None else value["per_s"]
    for number in (value["latency_s"], rate):
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise DataError(f"{path}: {name}: expected numbers, got {value!r}")
    try:
        return Cost(float(value["latency_s"]), float(rate))
    except DataError as error:
        raise DataError(f"{path}: {name}: {error}") from error


# Profiles of disks ------------------------------------------------------------------------------------------
#
# The best transfer size and queue depth of each disk, measured by `tierstore bench io` for stores to use. One JSON file per
# user: $XDG_STATE_HOME/tierstore/io-profile.json (~/.local/state if unset), or the file that TIERSTORE_IO_PROFILE names;
# "none" there turns the profile off. Entries are keyed by host and device, so several machines may share a home directory,
# and a disk may be mounted elsewhere. Transfer size and depth change how fast bytes move, never which, nor what is computed.

IO_PROFILE_VERSION = 1
_FORMAT = "tierstore-io-profile"
_VARIABLE = "TIERSTORE_IO_PROFILE"
_CHUNK_UNIT = 4096
_GREATEST_CHUNK = 64 << 20
_GREATEST_DEPTH = 1024


@dataclass(frozen=True, kw_only=True)
class IoPoint:
    """Transfers of ``chunk_bytes``, ``queue_depth`` in flight, and the rates reached; ``measured``: the day (ISO 8601)."""

    chunk_bytes: int
    queue_depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    measured: str


def profile_path() -> Path | None:
    """The profile's path, whether or not it exists; None if the profile is off."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return None if named in ("", "none") else Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local/state"
    return base / "tierstore/io-profile.json"


def device_name(directory: Path) -> str:
    """A name of the disk under ``directory`` that survives restarts: host, file system and its size, device and model.

    Without a block device (tmpfs, NFS, overlay): host, file system and the directory where it is mounted. Raises OSError.
    """
    host, space, device = platform.node() or "localhost", disk(directory), block_device(directory)
    if device == "unknown":
        return f"{host}: {space.filesystem} at {_mount_point(directory)}"
    return f"{host}: {space.filesystem} of {space.total_bytes} bytes on {device}"


def _mount_point(directory: Path) -> Path:
    place = directory.resolve()
    while not place.is_mount() and place != place.parent:
        place = place.parent
    return place


def load_io_point(directory: Path) -> IoPoint | None:
    """The point measured for the disk under ``directory``; None if there is none.

    Raises DataError naming the file and what is wrong with it, OSError.
    """
    path = profile_path()
    if path is None:
        return None
    try:
        devices = _load_devices(path)
    except FileNotFoundError:
        return None
    name = device_name(directory)
    return _point(path, name, devices[name]) if name in devices else None


def save_io_point(directory: Path, point: IoPoint) -> Path | None:
    """Save ``point`` atomically for the disk under ``directory``. Returns the profile's path, or None if the profile is off.

    A profile of another version, or one that cannot be read, is not overwritten. Raises DataError, OSError.
    """
    path = profile_path()
    if path is None:
        return None
    try:
        devices = dict(_load_devices(path))
    except FileNotFoundError:
        devices = {}
    devices[device_name(directory)] = asdict(point)
    text = json.dumps({"format": _FORMAT, "version": IO_PROFILE_VERSION, "devices": devices}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, OutputKind.IO_PROFILE, text + "\n")
    return path


def _load_devices(path: Path) -> Mapping[str, object]:
    plain = _read(path, "an I/O profile")
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise DataError(f"{path}: not an I/O profile")
    if plain.get("version") != IO_PROFILE_VERSION:
        raise DataError(
            f"{path}: expected an I/O profile of version {IO_PROFILE_VERSION}, got {plain.get('version')!r}"
        )
    devices = plain.get("devices")
    if not isinstance(devices, dict):
        raise DataError(f"{path}: devices: expected a table, got {devices!r}")
    return devices


def _point(path: Path, name: str, value: object) -> IoPoint:
    where = f"{path}: {name}"
    if not isinstance(value, Mapping) or set(value) != {field.name for field in fields(IoPoint)}:
        raise DataError(f"{where}: expected what `tierstore bench io` writes, got {value!r}")
    chunk, depth = value["chunk_bytes"], value["queue_depth"]
    if type(chunk) is not int or not _CHUNK_UNIT <= chunk <= _GREATEST_CHUNK or chunk % _CHUNK_UNIT:
        raise DataError(f"{where}: chunk_bytes: expected a multiple of 4096 up to 64 MiB, got {chunk!r}")
    if type(depth) is not int or not 1 <= depth <= _GREATEST_DEPTH:
        raise DataError(f"{where}: queue_depth: expected 1 to {_GREATEST_DEPTH}, got {depth!r}")
    for key in ("read_bytes_per_s", "write_bytes_per_s"):
        if not isinstance(value[key], int | float) or isinstance(value[key], bool) or not value[key] > 0:
            raise DataError(f"{where}: {key}: expected a positive number, got {value[key]!r}")
    return IoPoint(
        chunk_bytes=chunk,
        queue_depth=depth,
        read_bytes_per_s=float(value["read_bytes_per_s"]),
        write_bytes_per_s=float(value["write_bytes_per_s"]),
        measured=str(value["measured"]),
    )
