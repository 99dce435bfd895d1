"""The best transfer size and depth of each disk, as measured: what ``tierstore bench io`` leaves for stores to use.

One JSON file a user, ``$XDG_STATE_HOME/tierstore/io-profile.json`` (``~/.local/state`` without it), or what
``TIERSTORE_IO_PROFILE`` names; ``none`` there is no profile at all. Its entries go by host and device, so a home directory
that several machines share, and a disk that is mounted elsewhere, are no matter. Transfer size and depth change how fast
bytes move: never which, nor what is computed.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from tierstore.errors import DataError
from tierstore.machine import block_device, disk
from tierstore.outputs import OutputKind, write_output

IO_PROFILE_VERSION = 1
_FORMAT = "tierstore-io-profile"
_VARIABLE = "TIERSTORE_IO_PROFILE"
_CHUNK_UNIT = 4096
_GREATEST_CHUNK = 64 << 20
_GREATEST_DEPTH = 1024


@dataclass(frozen=True, kw_only=True)
class IoPoint:
    """Transfers of ``chunk_bytes``, ``queue_depth`` in flight, and what they reached; ``measured``: the day (ISO 8601)."""

    chunk_bytes: int
    queue_depth: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    measured: str


def profile_path() -> Path | None:
    """Where the profile is or would be; None when there is to be none."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return None if named in ("", "none") else Path(named)
    state = os.environ.get("XDG_STATE_HOME")
    base = Path(state) if state else Path.home() / ".local/state"
    return base / "tierstore/io-profile.json"


def device_name(directory: Path) -> str:
    """What names the disk under ``directory`` across restarts: host, file system and its size, device and model.

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
    """What was measured for the disk under ``directory``; None for nothing.

    Raises DataError naming the file and what is wrong with it, OSError.
    """
    path = profile_path()
    if path is None:
        return None
    try:
        devices = _load(path)
    except FileNotFoundError:
        return None
    name = device_name(directory)
    return _point(path, name, devices[name]) if name in devices else None


def save_io_point(directory: Path, point: IoPoint) -> Path | None:
    """Puts ``point`` in the profile for the disk under ``directory``, whole or not at all. Where it went, or None.

    A profile of another version, or that cannot be read, is an error and not overwritten. Raises DataError, OSError.
    """
    path = profile_path()
    if path is None:
        return None
    try:
        devices = dict(_load(path))
    except FileNotFoundError:
        devices = {}
    devices[device_name(directory)] = asdict(point)
    text = json.dumps({"format": _FORMAT, "version": IO_PROFILE_VERSION, "devices": devices}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, OutputKind.IO_PROFILE, text + "\n")
    return path


def _load(path: Path) -> Mapping[str, object]:
    try:
        plain = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path}: not an I/O profile: not JSON: {error}") from error
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
    if not _is_whole(chunk) or not _CHUNK_UNIT <= chunk <= _GREATEST_CHUNK or chunk % _CHUNK_UNIT:
        raise DataError(f"{where}: chunk_bytes: expected a multiple of 4096 up to 64 MiB, got {chunk!r}")
    if not _is_whole(depth) or not 1 <= depth <= _GREATEST_DEPTH:
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


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
