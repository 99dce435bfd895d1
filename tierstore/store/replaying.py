"""Weights of records with missed steps, in a store that is opened to read.

Such a record is read whole: its weights into the host cache, its moments into scratch, where what it missed is replayed on
both. Its weights are then a clean entry of the cache like any other, caught up with the last applied step; the record on
disk stays as far behind as it is, and when its entry has been evicted it is read and replayed again. To the residency core
a fetch of such weights is one read of all the bytes of the record's groups, so a trace and its replay count the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore._native import Buffer, Engine, Priority
from tierstore.cache.host_cache import Backing
from tierstore.store.format import Group, Placement, RecordSchema
from tierstore.store.index.live import LiveIndex
from tierstore.store.optimizer import CachedRecord, RecordOptimizer
from tierstore.store.scratch import scratch_buffers

#: Records whose moments are in memory at once: one is read while another one is replayed.
_REPLAYS = 2


def replays(schema: RecordSchema) -> bool:
    """Whether records of ``schema`` can have missed steps."""
    return schema.placement is Placement.CACHED and not schema.frozen


def replay_scratch_bytes(schema: RecordSchema) -> int:
    """Bytes of the host budget that replays take where any record of ``schema`` has missed steps."""
    return _REPLAYS * schema.layout(Group.MOMENTS).slot_bytes


def replayed_bytes(schema: RecordSchema) -> int:
    """Bytes that a read of the weights of a record with missed steps moves: those of all its groups."""
    return sum(schema.layout(group).slot_bytes for group in schema.groups)


def mean_read_bytes(schema: RecordSchema, *, records: int, missed: int) -> float:
    """Bytes that a read of a record's weights moves, the mean over ``records`` of which ``missed`` have missed steps."""
    current = schema.layout(Group.WEIGHTS).slot_bytes
    return current + (replayed_bytes(schema) - current) * (missed / records if records else 0.0)


@dataclass(slots=True)
class _Scratch:
    """Memory for the moments of one record. ``used``: the last ticket that uses it."""

    sections: list[Buffer]
    used: list[int] = field(default_factory=list)


class CaughtUpRecords:
    """The records of ``live`` as a host cache of weights reads them: caught up. ``begin`` comes before the first read."""

    def __init__(self, engine: Engine, live: LiveIndex, scratch: Sequence[RecordSchema]) -> None:
        """``scratch``: the schemas of the records that have missed steps."""
        self._engine = engine
        self._live = live
        self._scratch = {
            schema.name: [_Scratch(scratch_buffers(schema.layout(Group.MOMENTS))) for _ in range(_REPLAYS)]
            for schema in scratch
        }
        self._scratch_bytes = sum(replay_scratch_bytes(schema) for schema in scratch)
        self._optimizer: RecordOptimizer | None = None

    def begin(self, optimizer: RecordOptimizer) -> None:
        """``optimizer`` knows the steps that were missed."""
        self._optimizer = optimizer

    def end(self) -> None:
        """Nothing is read any more. The optimizer knows the cache that reads here: a cycle would keep the cache's memory
        until a collection of garbage.
        """
        self._optimizer = None

    @property
    def scratch_bytes(self) -> int:
        """What the scratch takes of the host budget."""
        return self._scratch_bytes

    def backing(self, number: int) -> Backing:
        """The record that the host cache knows by ``number``."""
        live = self._live.backing(number)
        record = CachedRecord(number, live)
        if self._optimizer is None or not self._optimizer.behind(record):
            return live
        return _Replayed(record, self)

    def read(
        self, record: CachedRecord, sections: Sequence[Buffer], after: Sequence[int], priority: Priority
    ) -> int:
        """Queues the read of the weights of ``record``, and the replay of what it missed; returns the replay's ticket."""
        assert self._optimizer is not None
        live = record.live
        ring = self._scratch[live.schema.name]
        scratch = ring.pop(0)
        ring.append(scratch)
        # What has finished, even badly, delays nothing any more, and must not fail this.
        before = [ticket for ticket in scratch.used if not self._engine.done(ticket)]
        tickets = [
            live.read(Group.WEIGHTS, sections, after, priority),
            live.read(Group.MOMENTS, scratch.sections, before, priority),
        ]
        replay = self._optimizer.replay_copy(record, [*sections, *scratch.sections], after=tickets)
        scratch.used = [replay]
        return replay


class _Replayed:
    """The ``Backing`` of a record that has missed steps."""

    def __init__(self, record: CachedRecord, records: CaughtUpRecords) -> None:
        self._record = record
        self._records = records

    @property
    def key(self) -> str:
        return self._record.live.key

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        if group != Group.WEIGHTS:
            raise AssertionError(f"record {self.key}: read of {Group(group).label} that are behind")
        return self._records.read(self._record, sections, after, priority)

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        raise AssertionError(f"record {self.key}: write of {Group(group).label} in a store opened to read")
