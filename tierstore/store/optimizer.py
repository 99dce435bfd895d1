"""AdamW on cached records, in the engine: steps and replays are queued after the reads that they need.

Nothing here waits. Each call queues one operation on the record's resident sections and advances the record's
step; the record must be pinned with weights and moments (``Need.STEP``), and they become dirty.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence

from tierstore import _native
from tierstore._native import Buffer, DoubleTable, Engine, Priority
from tierstore.cache.host_cache import Backing, HostCache
from tierstore.errors import StoreError
from tierstore.store.adamw import Row, StepHistory
from tierstore.store.disk.extents import scratch_buffers
from tierstore.store.format import Group, MomentFormat, Placement, RecordSchema
from tierstore.store.index.live import LiveIndex, LiveRecord


def record_hash(key: str) -> int:
    """A 64-bit hash of record ``key``, independent of its location, for rounding narrow moments."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")


def refuse_frozen(record: LiveRecord) -> None:
    """Raises StoreError for a record that no optimizer step may take."""
    if record.schema.frozen:
        raise StoreError(f"record {record.key!r} is frozen: it has no moments, and no step takes it")


class RecordOptimizer:
    """Steps and replays records of one store under one step history."""

    def __init__(self, engine: Engine, cache: HostCache, history: StepHistory) -> None:
        self.history = history
        self._engine = engine
        self._cache = cache

    def behind(self, record: LiveRecord) -> int:
        """Steps to replay before the record's weights are used; 0 for a frozen or owner-held record."""
        if not replays(record.schema):
            return 0
        return max(self.history.missed(record.step), 0)  # a record that has taken the open step is ahead

    def catch_up(self, record: LiveRecord) -> None:
        """Queues the replay of all missed steps of the record, in one pass."""
        if self.behind(record) > 0:
            applied = self.history.applied
            self._adamw(record, self.history.rows(record.step, applied), applied, None, 1.0, ())

    def replay_copy(self, record: LiveRecord, sections: Sequence[Buffer], *, after: Sequence[int]) -> int:
        """Queues the replay of the record's missed steps on a copy of its weights and moments; returns its ticket.

        The record itself does not change.
        """
        applied = self.history.applied
        rows = self.history.rows(record.step, applied)
        return self._queue(record, sections, rows, applied, None, 1.0, after)

    def step(
        self,
        record: LiveRecord,
        gradient: Buffer,
        *,
        number: int | None = None,
        scale: float = 1.0,
        squares: DoubleTable | None = None,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """Queues optimizer step ``number`` (None: the open one) with ``gradient`` (flat, fp32 or bf16) times ``scale``, and
        in the same pass the record's missed steps; returns the ticket. It also stores the gradient's sum of squares, before
        it is scaled, in ``squares[record.number]``. Whatever follows the step urgently makes it urgent, too.

        ``number`` may be an applied step, for a gradient that waited for that step's norm. Raises StoreError if no step
        is open, or the record is frozen or has taken the step.
        """
        refuse_frozen(record)
        if number is None or number > self.history.applied:
            number = self.history.current
        rows, reached = self.history.step_rows(record.step, number)
        return self._adamw(record, rows, reached, gradient, scale, after, squares, priority)

    def _adamw(
        self,
        record: LiveRecord,
        rows: Row,
        reached: int,
        gradient: Buffer | None,
        scale: float,
        after: Sequence[int],
        squares: DoubleTable | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """Queues ``rows`` on the resident record; the last of them takes it to step ``reached``."""
        cache = self._cache
        weights, moments = record.entry(Group.WEIGHTS), record.entry(Group.MOMENTS)
        sections = [*cache.sections(weights), *cache.sections(moments)]
        after = [*after, *cache.before_write(weights), *cache.before_write(moments)]
        ticket = self._queue(record, sections, rows, reached, gradient, scale, after, squares, priority)
        cache.wrote(weights, ticket)
        cache.wrote(moments, ticket)
        record.step, record.changed = reached, True
        return ticket

    def _queue(
        self,
        live: LiveRecord,
        sections: Sequence[Buffer],
        rows: Row,
        reached: int,
        gradient: Buffer | None,
        scale: float,
        after: Sequence[int],
        squares: DoubleTable | None = None,
        priority: Priority = Priority.DEMAND,
    ) -> int:
        moments = live.schema.moments
        ends = len(sections) - (2 if moments is MomentFormat.INT8 else 0)
        *weights, exp_avg, exp_avg_sq = sections[:ends]
        return self._engine.adamw(
            weights,
            exp_avg,
            exp_avg_sq,
            gradient,
            rows,
            scale,
            moments=_native.MomentFormat[moments.name],
            scales=sections[ends:],
            record_hash=0 if moments is MomentFormat.FP32 else record_hash(live.key),
            last_step=reached,
            squares=squares,
            index=live.number,
            after=after,
            priority=priority,
        )


#: Records whose moments are in memory at once: one is read while another one is replayed.
_REPLAYS = 2


def replays(schema: RecordSchema) -> bool:
    """Whether records of ``schema`` can have missed steps."""
    return schema.placement is Placement.CACHED and not schema.frozen


def replay_scratch_bytes(schema: RecordSchema) -> int:
    """Bytes of the host budget for replays, if a record of ``schema`` has missed steps."""
    return _REPLAYS * schema.layout(Group.MOMENTS).slot_bytes


class CaughtUpRecords:
    """The records of ``live``, caught up when a host cache of weights reads them. Call ``begin`` before the first read."""

    def __init__(self, engine: Engine, live: LiveIndex, scratch: Sequence[RecordSchema]) -> None:
        """``scratch``: the schemas of the records that have missed steps."""
        self._engine = engine
        self._live = live
        #: By schema: memory for the moments of one record each, and the last ticket that uses it (0: none).
        self._scratch = {
            schema.name: deque((scratch_buffers(schema.layout(Group.MOMENTS)), 0) for _ in range(_REPLAYS))
            for schema in scratch
        }
        self._scratch_bytes = sum(replay_scratch_bytes(schema) for schema in scratch)
        self._optimizer: RecordOptimizer | None = None

    def begin(self, optimizer: RecordOptimizer) -> None:
        """Sets the ``optimizer``, which knows the missed steps."""
        self._optimizer = optimizer

    def end(self) -> None:
        """Breaks the reference cycle with the optimizer, which would keep the cache's memory until a garbage collection."""
        self._optimizer = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch in the host budget."""
        return self._scratch_bytes

    def backing(self, number: int) -> Backing:
        """The record with ``number`` in the host cache."""
        live = self._live.backing(number)
        if self._optimizer is None or not self._optimizer.behind(live):
            return live
        return _Replayed(live, self)

    def read(
        self, record: LiveRecord, sections: Sequence[Buffer], after: Sequence[int], priority: Priority
    ) -> int:
        """Queues the read of the weights of ``record``, and the replay of its missed steps; returns the replay's ticket."""
        assert self._optimizer is not None
        ring = self._scratch[record.schema.name]
        ring.rotate(-1)
        moments, used = ring[-1]
        # Finished operations, even failed ones, delay nothing any more, and must not make this one fail.
        before = [used] if used and not self._engine.done(used) else []
        tickets = [
            record.read(Group.WEIGHTS, sections, after, priority),
            record.read(Group.MOMENTS, moments, before, priority),
        ]
        replay = self._optimizer.replay_copy(record, [*sections, *moments], after=tickets)
        ring[-1] = moments, replay
        return replay


class _Replayed:
    """The ``Backing`` of a record that has missed steps."""

    def __init__(self, record: LiveRecord, records: CaughtUpRecords) -> None:
        self._record = record
        self._records = records

    @property
    def key(self) -> str:
        return self._record.key

    def read(self, group: int, sections: Sequence[Buffer], after: Sequence[int], priority: Priority) -> int:
        if group != Group.WEIGHTS:
            raise AssertionError(f"record {self.key}: read of {Group(group).label} that are behind")
        return self._records.read(self._record, sections, after, priority)

    def write(self, group: int, sections: Sequence[Buffer], after: Sequence[int]) -> int:
        raise AssertionError(f"record {self.key}: write of {Group(group).label} in a store opened to read")
