"""Every byte of a closed store against the model, read from its files by their documented format.

The last commit and every snapshot are read with plain reads, at the offsets that the index names. Nothing of the
store's own reading is used: no cache, no engine, no checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tierstore.bench.soak.model import StoreModel, content, wrong_bytes
from tierstore.bench.soak.plan import SoakShape, key_of
from tierstore.store import Group
from tierstore.store.index.database import Commit
from tierstore.store.index.table import RecordEntry
from tierstore.store.reading import reading


@dataclass
class Audit:
    """What was read; ``wrong`` says of each section that differs what and where, ``wrong_bytes`` how much in all."""

    verified_bytes: int = 0
    wrong_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, text: str, count: int) -> None:
        self.wrong.append(text)
        self.wrong_bytes += count


def committed_generation(directory: Path) -> int:
    """The generation of the last commit of the store in ``directory``, which no process may have open to write."""
    with reading(directory) as (_, index):
        return index.read_commit().generation


def audit(directory: Path, shape: SoakShape, model: StoreModel, *, further: Sequence[Path] = ()) -> Audit:
    """Compares the last commit with ``model.committed`` and the snapshots with its own. No process may have it open to
    write.

    ``further`` are its other directories, in their order.
    """
    roots = (directory, *further)
    result = Audit()
    with reading(directory) as (_, index):
        names = list(index.snapshots())
        if names != list(model.snapshots):
            result.complain(f"snapshots {names}, expected {list(model.snapshots)}", 0)
            return result
        commits = [("last commit", index.read_commit(), model.committed)]
        commits += [(name, index.read_commit(name), model.snapshots[name]) for name in names]
        seen: set[tuple[int, Group, int, int, int]] = set()
        for where, commit, versions in commits:
            if sorted(commit.records) != [key_of(record) for record in range(shape.records)]:
                result.complain(f"{where}: it has other records than were registered", 0)
                continue
            for record, version in enumerate(versions):
                _check(roots, shape, model.seed, result, (where, record, version), commit, seen)
    return result


def _check(
    roots: Sequence[Path],
    shape: SoakShape,
    seed: int,
    result: Audit,
    what: tuple[str, int, int],
    commit: Commit,
    seen: set[tuple[int, Group, int, int, int]],
) -> None:
    """One record of one commit. A slot that commits share, at the same version, is read once."""
    where, record, version = what
    entry = commit.records[key_of(record)]
    slots = {
        (record, group, location.directory, location.slot, version)
        for group, location in zip(shape.schema(record).groups, entry.groups, strict=True)
    }
    if slots <= seen:
        return
    seen |= slots
    expected = content(seed, record, version, shape.schema(record))
    for name, path, found in _sections(roots, shape, record, entry):
        result.verified_bytes += found.nbytes
        wrong = wrong_bytes(found, expected[name])
        if wrong:
            result.complain(f"{where}: {key_of(record)}, section {name}, {path}: {wrong} wrong bytes", wrong)


def _sections(
    roots: Sequence[Path], shape: SoakShape, record: int, entry: RecordEntry
) -> Iterator[tuple[str, Path, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    schema = shape.schema(record)
    for group, location in zip(schema.groups, entry.groups, strict=True):
        layout = schema.layout(group)
        path = roots[location.directory] / "extents" / f"{schema.name}.{group.label}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(descriptor, layout.slot_bytes, location.slot * layout.slot_bytes)
        finally:
            os.close(descriptor)
        offset = 0
        for section in layout.sections:
            found = np.frombuffer(data[offset : offset + section.nbytes], np.uint8)
            yield section.name, path, found
            offset += section.padded_nbytes
