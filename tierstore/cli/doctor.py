"""``tierstore doctor``: the machine's capabilities, the backend each resolved to, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierstore import __version__, machine
from tierstore.accelerator import device_count, probe_accelerator
from tierstore.capabilities import (
    Capability,
    Finding,
    chosen_instruction_set,
    probe_dax,
    probe_direct_io,
    probe_fallocate,
    probe_huge_pages,
    probe_instructions,
    probe_io_uring,
    probe_locks,
    resolve,
)
from tierstore.cli.options import PATH, json_option
from tierstore.cli.output import Output
from tierstore.devices import disk_health, disks_under
from tierstore.errors import ConfigError
from tierstore.machine_profile import profile_path
from tierstore.store.config import IoConfig, tune
from tierstore.units import format_bytes

if TYPE_CHECKING:
    from tierstore.store.disk.drives import DriveReport


@dataclass(frozen=True, slots=True)
class Check:
    """The probe of a capability in a directory; ``backend`` is used with the capability, ``fallback`` without it."""

    probe: Callable[[Path], Finding]
    backend: str
    fallback: str


CHECKS: Mapping[str, Check] = {
    "io_uring": Check(lambda _: probe_io_uring(), "io_uring", "threads"),
    "direct_io": Check(probe_direct_io, "O_DIRECT", "buffered"),
    "locks": Check(probe_locks, "directory and lease", "lease alone"),
    "fallocate": Check(probe_fallocate, "reserved space", "no store"),
    "huge_pages": Check(lambda _: probe_huge_pages(), "huge pages", "4 KiB pages"),
    "avx512": Check(lambda _: probe_instructions("avx512"), "AVX-512", "AVX2 or scalar"),
    "avx2": Check(lambda _: probe_instructions("avx2"), "AVX2", "scalar"),
    "cuda": Check(lambda _: probe_accelerator(), "CUDA", "CPU as device"),
    "dax": Check(probe_dax, "DAX mapping", "read and write"),
}


@click.command()
@click.option(
    "--dir",
    "directory",
    type=PATH,
    default=Path(),
    help="Directory whose disk is probed.",
)
@click.option(
    "--store",
    type=PATH,
    help="Also show this store's drives (all ranks); no process may be writing it.",
)
@click.option(
    "--capability",
    "settings",
    metavar="NAME=off|auto|on",
    multiple=True,
    help="Resolve a capability with this setting; `on` fails if the machine lacks it.",
)
@json_option
def doctor(directory: Path, store: Path | None, settings: tuple[str, ...], output: Output) -> None:
    """Show this machine's capabilities, the backend that each resolved to, and why."""
    chosen = _settings(settings)
    facts = machine_facts(directory)
    reports: list[DriveReport] = []
    drives = [_drive(directory.resolve(), {})]
    if store is not None:
        from tierstore.store.reading import drives_of

        reports = drives_of(store)
        drives = [_drive(report.path, report.as_json()) for report in reports]
    capabilities = []
    for name, check in CHECKS.items():
        setting = chosen.get(name, Capability.AUTO)
        found = resolve(name, setting, partial(check.probe, directory))
        capabilities.append(
            {
                "name": name,
                "setting": setting.value,
                "effective": "on" if found else "off",
                "backend": check.backend if found else check.fallback,
                "reason": found.reason,
            }
        )
    output.table(
        "Capabilities",
        ["capability", "setting", "effective", "backend", "why"],
        [tuple(one.values()) for one in capabilities],
    )
    output.line()
    rows = [(name.removesuffix("_bytes").replace("_", " "), _shown(name, facts[name])) for name in facts]
    output.table("Machine", ["fact", "value"], rows)
    output.line()
    if store is not None:
        output.drives("Store", reports)
        output.line()
    output.table(
        "Drives",
        ["directory", "disk", "kind", "size", "health"],
        [row for drive in drives for row in _disk_rows(drive)],
    )
    output.emit({"capabilities": capabilities, **facts, "drives": drives})


def _drive(path: Path, stored: Mapping[str, object]) -> dict[str, Any]:
    """A directory with its disks, and what a store keeps there (``stored``), as JSON."""
    found = [(disk, disk_health(disk)) for disk in disks_under(path)] if path.exists() else []
    return {
        "path": str(path),
        **stored,
        "missing": not path.exists(),
        "disks": [
            {
                "name": disk.name,
                "through": list(disk.through),
                "model": disk.model,
                "kind": disk.kind,
                "size_bytes": disk.size_bytes,
                "health": str(health),
                "warnings": list(health.warnings),
                "worn_percent": health.used_percent,
                "spare_percent": health.spare_percent,
                "lifetime_written_bytes": health.written_bytes,
                "media_errors_count": health.media_errors,
            }
            for disk, health in found
        ],
    }


def _disk_rows(drive: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if drive["missing"]:
        return [(drive["path"], "MISSING", "", "", "")]
    return [
        (
            drive["path"],
            " on ".join([*disk["through"], f"{disk['name']} {disk['model']}".strip()]),
            disk["kind"],
            format_bytes(disk["size_bytes"]),
            disk["health"],
        )
        for disk in drive["disks"]
    ] or [(drive["path"], "none", "no block device", "", "")]


def _settings(texts: tuple[str, ...]) -> dict[str, Capability]:
    chosen: dict[str, Capability] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in CHECKS:
            raise ConfigError(f"--capability: unknown name {name!r}; expected one of {', '.join(CHECKS)}")
        if value not in [setting.value for setting in Capability]:
            raise ConfigError(f"--capability {name}: expected off, auto or on, got {value!r}")
        chosen[name] = Capability(value)
    return chosen


def machine_facts(directory: Path) -> dict[str, object]:
    """Facts of this machine and of the disk under ``directory``. Imports torch. Raises OSError."""
    space = machine.disk(directory)
    memory = machine.memory()
    tuning = tune(IoConfig(), directory)
    import torch

    return {
        "tierstore_version": __version__,
        "kernel": machine.kernel(),
        "cores": machine.cores(),
        "instruction_set": chosen_instruction_set(),
        "memory_total_bytes": memory.total_bytes,
        "memory_available_bytes": memory.available_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "directory": str(directory.resolve()),
        "filesystem": space.filesystem,
        "disk_free_bytes": space.free_bytes,
        "disk_total_bytes": space.total_bytes,
        "io_transfer_bytes": tuning.chunk_bytes,
        "io_in_flight_count": tuning.queue_depth,
        "io_tuning": tuning.chunk_reason,
        "io_profile": str(profile_path() or "none"),
        "torch_version": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        # As torch's OpenMP saw it; "unset" makes idle workers spin.
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "rank_exchanges": rank_exchanges(),
    }


def rank_exchanges() -> str:
    """The backends through which ranks on this machine would communicate. Imports torch."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "none: this torch has no Gloo, which multi-rank runs need"
    devices = device_count() if dist.is_nccl_available() else 0
    nccl = f", NCCL between {devices} CUDA device{'s' * (devices > 1)}" if devices else ""
    return f"Gloo between CPUs{nccl}; run tierstore bench machine to measure message times"


def _shown(name: str, value: object) -> str:
    if value is None:
        return "none"
    return format_bytes(value) if name.endswith("_bytes") and isinstance(value, int) else str(value)
