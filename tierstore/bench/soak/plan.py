"""What a soak does, operation by operation: a pure function of the seed and the position, so that it can be done again.

Records are asked for as often as their rank in a Zipf distribution says; the ranks change with every block of
operations. The same plan is followed by the process that works on the store and by the one that kills it, which
moves its own model along.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from tierstore.bench.soak.model import StoreModel
from tierstore.lab.generators import Zipf
from tierstore.store import Group, RecordSchema, WeightFormat
from tierstore.store.opening import minimum_host_budget

_BLOCK = 256
_MOST_RECORDS = 4  # of one operation
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
    """Something that must be refused with the documented error, and change nothing."""

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
    """One operation on ``records``; ``groups`` are those of a fetch."""

    kind: OperationKind
    records: tuple[int, ...]
    groups: tuple[Group, ...]
    misuse: Misuse


@dataclass(frozen=True, kw_only=True)
class SoakShape:
    """The store: ``store_bytes`` of records of about ``record_bytes``, every other one with split weights and of a size
    that fills no page; ``host_budget_bytes`` of cache; ``retain`` snapshots.
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
        """An even number, and enough that not even half of them fit the budget."""
        pair = sum(schema.record_bytes for schema in self.schemas)
        return 2 * max(self.store_bytes // pair, 2 * self.budget // pair + 1)

    def schema(self, record: int) -> RecordSchema:
        return self.schemas[record % 2]

    @property
    def budget(self) -> int:
        """Bytes of host cache: as asked for, but enough for the records of one operation."""
        return max(self.host_budget_bytes, (_MOST_RECORDS + 1) * minimum_host_budget(self.schemas))

    @property
    def fetches_at_once(self) -> int:
        """How many fetches of the most records may be leased together, half of the budget being left for the rest."""
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
        """What the operation at ``position`` does to ``model``."""
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
