"""What one stage finds in the store that another has left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierstore.errors import ChecksumError, StoreFormatError
from tierstore.hf.manifest import Manifest, Weights
from tierstore.store.disk.home import rank_directories
from tierstore.store.parameter_store import open_to_read


def store_checks(store: Path) -> dict[str, object]:
    """Counts, shapes and checksums over all records of the frozen store at ``store``, of one rank or several.

    Everything is read and checked. Raises ChecksumError, StoreFormatError, OSError.
    """
    manifest = Manifest.read(store)
    if manifest.weights is not Weights.FROZEN:
        raise StoreFormatError(f"{store}: expected a store of weights alone, found {manifest.weights.value}")
    directories = rank_directories(store) or [store]
    records, sums = 0, []
    for directory in directories:
        with open_to_read(directory) as opened:
            records += len(opened.keys)
            sums.append(f"{opened.records_crc32c():08x}")
    units = sum(1 for layout in manifest.unit_layouts(len(directories)) if not layout.empty)
    expected = manifest.experts.records + units * len(directories)
    if records != expected:
        raise StoreFormatError(f"{store}: {records} records, expected {expected}")
    return {
        "records": records,
        "crc32c": sums,
        "experts_per_layer": manifest.experts.count,
        "expert_values": manifest.experts.numel,
        "moe_layers": len(manifest.experts.layers),
        "dense_values": manifest.dense_parameters,
    }


def verify_checks(store: Path, wanted: Mapping[str, object]) -> None:
    """Compares ``store_checks`` with those that were recorded. Raises ChecksumError naming the first that differs."""
    found = store_checks(store)
    for name, value in wanted.items():
        if name in found and found[name] != value:
            raise ChecksumError(f"{store}: {name}: {found[name]}, and its stage recorded {value}")


def bytes_on_disk(directory: Path) -> int:
    """Bytes that the files below ``directory`` take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
