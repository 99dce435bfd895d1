"""What a soak does to a store, what the store must hold then, and the audit of a closed store against that.

The model is built from first principles: no byte of it comes from the store. AdamW with both betas 0, eps 1, weight decay
1 and learning rate 1 forgets: after a step with gradient g a record is

    weight = 0 * weight - g / (|g| + 1)        exp_avg = g        exp_avg_sq = g * g

in single precision, whatever it was before. So its content follows from the gradient alone, and gradients are noise that
follows from (seed, record, version). A version is the position, from 1, of the operation that stepped the record; version
0 is its registration, with noise as its weight and zeros as its moments. Records without a gradient stay unchanged
(``Inactive.SKIP``).

The plan is a pure function of the seed and the position, so that it can be repeated: the process that works on the store
follows it, and the one that kills it advances its own model. Records are requested by their rank in a Zipf distribution;
the ranks change with every block of operations.

The audit reads the last commit and every snapshot with plain reads, at the offsets that the index names. It uses nothing of
the store's own reading: no cache, no engine, no checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.lab.generators import Zipf
from tierstore.store import AdamWConfig, Group, Inactive, RecordSchema, WeightFormat
from tierstore.store.index.table import RecordEntry
from tierstore.store.opening import minimum_host_budget
from tierstore.store.reading import reading

#: The optimizer under which content follows from the last gradient alone.
FORGETFUL = AdamWConfig(betas=(0.0, 0.0), eps=1.0, weight_decay=1.0, inactive=Inactive.SKIP)
LEARNING_RATE = 1.0
_SIGN_AND_FRACTION = np.uint32(0x80FF_FFFF)
_EXPONENT = np.uint32(0x3F00_0000)


def gradient(seed: int, record: int, version: int, numel: int) -> NDArray[np.float32]:
    """Noise [numel] of magnitude 0.5 to 2 and either sign, whose products and quotients are normal numbers."""
    generator = np.random.Generator(np.random.SFC64([seed, record, version]))
    bits = generator.integers(0, 1 << 32, numel, np.uint32)
    bits &= _SIGN_AND_FRACTION
    bits |= _EXPONENT
    return bits.view(np.float32)


def content(seed: int, record: int, version: int, schema: RecordSchema) -> dict[str, NDArray[np.generic]]:
    """Every section of the record by name, as left by version ``version``."""
    noise = gradient(seed, record, version, schema.numel)
    sections: dict[str, NDArray[np.generic]]
    if version:
        weight = np.abs(noise)
        weight += np.float32(1)
        np.divide(noise, weight, out=weight)
        np.negative(weight, out=weight)
        sections = {"exp_avg": noise, "exp_avg_sq": noise * noise}
    else:
        weight = noise
        zeros = np.zeros(schema.numel, np.float32)
        sections = {"exp_avg": zeros, "exp_avg_sq": zeros}
    if schema.weight_format is WeightFormat.FP32:
        return sections | {"weight": weight}
    bits = weight.view(np.uint32)
    # Magnitudes below 2 leave a bit for the carry, so adding to the bits rounds half away from zero.
    high = (bits + np.uint32(0x8000)) >> np.uint32(16)
    low = (bits - (high << np.uint32(16))).astype(np.uint16).view(np.int16)
    return sections | {"weight_hi": high.astype(np.uint16), "weight_lo": low}


def wrong_bytes(found: NDArray[np.generic], expected: NDArray[np.generic]) -> int:
    """The number of bytes that differ; if the lengths do, all bytes of the longer one."""
    if found.nbytes != expected.nbytes:
        return max(found.nbytes, expected.nbytes)
    if found.nbytes % 8 == 0 and np.array_equal(found.view(np.uint64), expected.view(np.uint64)):
        return 0
    return int(np.count_nonzero(found.view(np.uint8) != expected.view(np.uint8)))


@dataclass
class StoreModel:
    """The version of every record: now, at the last commit, and at each retained snapshot (oldest first)."""

    seed: int
    versions: list[int]
    retain: int = 0
    generation: int = 0
    committed: list[int] = field(default_factory=list)
    snapshots: dict[str, list[int]] = field(default_factory=dict)

    def update(self, records: Iterable[int], version: int) -> None:
        """``records`` are stepped by the operation that gives them ``version``."""
        for record in records:
            self.versions[record] = version

    def commit(self, snapshot: str | None = None) -> None:
        """Everything so far is durable, and kept under the name ``snapshot``, if given; the oldest snapshots are dropped."""
        self.generation += 1
        self.committed = list(self.versions)
        if snapshot is not None:
            self.snapshots[snapshot] = list(self.versions)
            while len(self.snapshots) > self.retain:
                del self.snapshots[next(iter(self.snapshots))]

    def reopen(self) -> None:
        """Drop what was not committed."""
        self.versions = list(self.committed)

    def copies(self) -> int:
        """The number of record copies that cannot share their bytes, over live, committed and snapshot versions."""
        tables: Sequence[list[int]] = [self.versions, self.committed, *self.snapshots.values()]
        return sum(len(set(versions)) for versions in zip(*(table for table in tables if table), strict=True))


# The plan ---------------------------------------------------------------------------------------------------

_BLOCK = 256
_MOST_RECORDS = 4  # in one operation
_ALPHA = 0.8
_PAGE_NUMEL = 1024
_GROUPS = ((Group.WEIGHTS,), (Group.MOMENTS,), (Group.WEIGHTS, Group.MOMENTS))


class OperationKind(Enum):
    FETCH = "fetch"
    UPDATE = "update"
    PREFETCH = "prefetch"
    COMMIT = "commit"
    SNAPSHOT = "snapshot"
    VERIFY = "verify"
    REOPEN = "reopen"
    MISUSE = "misuse"


class Misuse(Enum):
    """A misuse that must be refused with the documented error, and change nothing."""

    UNKNOWN_KEY = "fetch of an unknown key"
    LEASED_UPDATE = "update of a leased record"
    WRONG_GRADIENT = "gradient of a wrong shape"
    TOO_MUCH_AT_ONCE = "fetch of more than the host budget"
    SECOND_OPENER = "second opener of an open store"
    TAKEN_NAME = "register of a key that exists"


_SHARES = {
    OperationKind.FETCH: 0.62,
    OperationKind.UPDATE: 0.26,
    OperationKind.PREFETCH: 0.04,
    OperationKind.COMMIT: 0.05,
    OperationKind.SNAPSHOT: 0.01,
    OperationKind.VERIFY: 0.001,
    OperationKind.REOPEN: 0.004,
    OperationKind.MISUSE: 0.015,
}


@dataclass(frozen=True)
class SoakOperation:
    """One operation on ``records``; ``groups``: those of a fetch."""

    kind: OperationKind
    records: tuple[int, ...]
    groups: tuple[Group, ...]
    misuse: Misuse


@dataclass(frozen=True, kw_only=True)
class SoakShape:
    """The store: ``store_bytes`` of records of about ``record_bytes``, every other one with split weights and a size that
    does not fill pages; ``host_budget_bytes`` of cache; ``retain`` snapshots.
    """

    seed: int = 0
    store_bytes: int = 256 << 20
    record_bytes: int = 1 << 20
    host_budget_bytes: int = 64 << 20
    retain: int = 2

    @property
    def schemas(self) -> tuple[RecordSchema, RecordSchema]:
        numel = max(self.record_bytes // 12 // _PAGE_NUMEL, 1) * _PAGE_NUMEL
        odd = max(numel * 3 // 4, 1) + 7
        return RecordSchema("whole", numel), RecordSchema("split", odd, WeightFormat.SPLIT_BF16)

    @property
    def records(self) -> int:
        """An even number, large enough that not even half of the records fit the budget."""
        pair = sum(schema.record_bytes for schema in self.schemas)
        return 2 * max(self.store_bytes // pair, 2 * self.budget // pair + 1)

    def schema(self, record: int) -> RecordSchema:
        return self.schemas[record % 2]

    @property
    def budget(self) -> int:
        """Bytes of host cache: as configured, but at least enough for the records of one operation."""
        return max(self.host_budget_bytes, (_MOST_RECORDS + 1) * minimum_host_budget(self.schemas))

    @property
    def fetches_at_once(self) -> int:
        """How many of the largest fetches may be leased at once, leaving half of the budget for the rest."""
        largest = max(schema.record_bytes for schema in self.schemas)
        return min(max(self.budget // (2 * _MOST_RECORDS * largest), 1), 6)


def key_of(record: int) -> str:
    return f"record.{record:06d}"


class SoakPlan:
    """The operations of a soak of ``shape``, at positions from 0."""

    def __init__(self, shape: SoakShape) -> None:
        self._shape = shape
        self._block = -1
        self._operations: list[SoakOperation] = []

    def operation(self, position: int) -> SoakOperation:
        block, index = divmod(position, _BLOCK)
        if block != self._block:
            self._operations = self._make(block)
            self._block = block
        return self._operations[index]

    def _make(self, block: int) -> list[SoakOperation]:
        rng = np.random.default_rng([self._shape.seed, block])
        names, shares = list(_SHARES), np.array(list(_SHARES.values()))
        kinds = rng.choice(len(names), size=_BLOCK, p=shares / shares.sum())
        sizes = rng.integers(1, _MOST_RECORDS + 1, _BLOCK)
        groups = rng.integers(len(_GROUPS), size=_BLOCK)
        misuses = rng.integers(len(Misuse), size=_BLOCK)
        source = Zipf(keys=self._shape.records, alpha=_ALPHA)
        seeds = np.random.SeedSequence([self._shape.seed, block])
        drawn = source.stream(seeds).draw(_BLOCK * _MOST_RECORDS).reshape(_BLOCK, _MOST_RECORDS)
        return [
            SoakOperation(
                names[kinds[i]],
                tuple(dict.fromkeys(drawn[i, : sizes[i]].tolist())),
                _GROUPS[groups[i]],
                list(Misuse)[misuses[i]],
            )
            for i in range(_BLOCK)
        ]

    def apply(self, model: StoreModel, position: int) -> None:
        """Apply the operation at ``position`` to ``model``."""
        operation = self.operation(position)
        match operation.kind:
            case OperationKind.UPDATE:
                model.update(operation.records, position + 1)
            case OperationKind.COMMIT:
                model.commit()
            case OperationKind.SNAPSHOT:
                model.commit(snapshot_name(position))
            case OperationKind.REOPEN:
                model.reopen()
            case _:
                pass


def snapshot_name(position: int) -> str:
    return f"snapshot.{position:09d}"


# The audit --------------------------------------------------------------------------------------------------


@dataclass
class Audit:
    """The result of an audit: ``wrong`` names each section that differs and where, ``wrong_bytes`` their total."""

    verified_bytes: int = 0
    wrong_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def complain(self, text: str, count: int) -> None:
        self.wrong.append(text)
        self.wrong_bytes += count


def committed_generation(directory: Path) -> int:
    """The generation of the last commit of the store in ``directory``, which no process may have open for writing."""
    with reading(directory) as (_, index):
        return index.read_commit().generation


def audit(directory: Path, shape: SoakShape, model: StoreModel, *, further: Sequence[Path] = ()) -> Audit:
    """Compare the last commit with ``model.committed`` and the snapshots with the model's. No process may have the store
    open for writing.

    ``further``: its other directories, in order.
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
                result.complain(f"{where}: its records are not those registered", 0)
                continue
            for record, version in enumerate(versions):
                schema, entry = shape.schema(record), commit.records[key_of(record)]
                slots = {
                    (record, group, location.directory, location.slot, version)
                    for group, location in zip(schema.groups, entry.groups, strict=True)
                }
                if slots <= seen:  # shared with an earlier commit, at the same version
                    continue
                seen |= slots
                expected = content(model.seed, record, version, schema)
                for name, path, found in _sections(roots, schema, entry):
                    result.verified_bytes += found.nbytes
                    if wrong := wrong_bytes(found, expected[name]):
                        what = f"{where}: {key_of(record)}, section {name}, {path}"
                        result.complain(f"{what}: {wrong} wrong bytes", wrong)
    return result


def _sections(
    roots: Sequence[Path], schema: RecordSchema, entry: RecordEntry
) -> Iterator[tuple[str, Path, NDArray[np.uint8]]]:
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
