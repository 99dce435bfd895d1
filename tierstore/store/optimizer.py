"""AdamW on cached records, in the engine: steps and replays are queued behind the reads that they need.

Nothing here waits. Each call queues one operation on the record's resident sections and advances the record's
step; the record must be pinned with weights and moments (``Need.STEP``), and they become dirty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore._native import Buffer, Engine
from tierstore.cache.access import GROUP_STRIDE
from tierstore.cache.host_cache import HostCache
from tierstore.errors import StoreError
from tierstore.store.adamw import Row, StepHistory
from tierstore.store.format import Group
from tierstore.store.index.live import LiveRecord


@dataclass(frozen=True, slots=True)
class CachedRecord:
    """A record that the host cache holds: its number there, and the record itself."""

    number: int
    live: LiveRecord

    def entry(self, group: Group) -> int:
        return self.number * GROUP_STRIDE + group


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

    def behind(self, record: CachedRecord) -> int:
        """Steps that must be replayed before the record's weights are used; none of a frozen one."""
        if record.live.schema.frozen:
            return 0
        return max(self.history.missed(record.live.step), 0)  # one that the open step has stepped is ahead

    def catch_up(self, record: CachedRecord) -> None:
        """Queues the replay of every applied step that the record missed, in one pass."""
        if self.behind(record) > 0:
            rows = self.history.rows(record.live.step, self.history.applied)
            self._adamw(record, rows, None, 1.0, ())
            self._reached(record, self.history.applied)

    def replay_copy(self, record: CachedRecord, sections: Sequence[Buffer], *, after: Sequence[int]) -> int:
        """Queues the replay of what the record missed on a copy of its weights and moments; returns its ticket.

        The record itself stays as far behind as it is.
        """
        rows = self.history.rows(record.live.step, self.history.applied)
        *weights, exp_avg, exp_avg_sq = sections
        return self._engine.adamw(weights, exp_avg, exp_avg_sq, None, rows, 1.0, after=after)

    def step(
        self,
        record: CachedRecord,
        gradient: Buffer,
        *,
        number: int | None = None,
        scale: float = 1.0,
        after: Sequence[int] = (),
    ) -> int:
        """Queues optimizer step ``number`` (None: the open one) with ``gradient`` (fp32, flat) times ``scale``; returns its
        ticket.

        An applied step's number is for a gradient that waited for that step's norm. Whatever the record missed before is
        replayed in the same pass. Raises StoreError where no step is open, or the record has taken the step already, or
        is frozen.
        """
        refuse_frozen(record.live)
        if number is None or number > self.history.applied:
            number = self.history.current
        rows, reached = self.history.step_rows(record.live.step, number)
        ticket = self._adamw(record, rows, gradient, scale, after)
        self._reached(record, reached)
        return ticket

    def _adamw(
        self, record: CachedRecord, rows: Row, gradient: Buffer | None, scale: float, after: Sequence[int]
    ) -> int:
        cache = self._cache
        weights, moments = record.entry(Group.WEIGHTS), record.entry(Group.MOMENTS)
        moment_sections = cache.sections(moments)
        ticket = self._engine.adamw(
            [*cache.sections(weights), *moment_sections[:-2]],
            moment_sections[-2],
            moment_sections[-1],
            gradient,
            rows,
            scale,
            after=[*after, *cache.before_write(weights), *cache.before_write(moments)],
        )
        cache.wrote(weights, ticket)
        cache.wrote(moments, ticket)
        return ticket

    def _reached(self, record: CachedRecord, step: int) -> None:
        record.live.step = step
        record.live.changed = True
