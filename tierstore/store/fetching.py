"""Pinned records for reading: a lease, and views of its sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore._native import Buffer
from tierstore.cache.access import Need, Phase
from tierstore.errors import BudgetError, StoreError
from tierstore.store.config import StoreAccess
from tierstore.store.core import StoreCore
from tierstore.store.format import Group, RecordSchema
from tierstore.store.index.live import LiveRecord
from tierstore.store.records import by_layer

_NEED = {Group.WEIGHTS: Need.WEIGHTS, Group.MOMENTS: Need.MOMENTS}


class RecordView:
    """The fetched sections of one pinned record. Views are valid until the lease is released."""

    def __init__(self, schema: RecordSchema, groups: Mapping[Group, Sequence[Buffer]]) -> None:
        self._sections = {
            section.name: (section, buffer)
            for group, buffers in groups.items()
            for section, buffer in zip(schema.layout(group).sections, buffers, strict=True)
        }
        self._views: dict[str, npt.NDArray[np.generic]] = {}

    @property
    def sections(self) -> list[str]:
        return list(self._sections)

    def view(self, name: str) -> npt.NDArray[np.generic]:
        """The section, read-only: the host cache's memory if it is contiguous, otherwise one copy for the lease. Raises
        KeyError for a section that was not fetched.
        """
        if name not in self._views:
            section, buffer = self._sections[name]
            array = buffer.array().view(section.dtype) if buffer.contiguous else self.copy(name)
            array.flags.writeable = False
            self._views[name] = array
        return self._views[name]

    def copy(self, name: str) -> npt.NDArray[np.generic]:
        """A copy of the section, which outlives the lease. Raises KeyError for one that was not fetched."""
        section, buffer = self._sections[name]
        content = np.empty(section.nbytes, np.uint8)
        buffer.copy_to(content)
        return content.view(section.dtype)


class Lease:
    """Records pinned in memory. A context manager, and a mapping of keys to ``RecordView``."""

    def __init__(
        self, views: Mapping[str, RecordView], tickets: Sequence[int], release: Callable[[], None]
    ) -> None:
        self._views = views
        self._release: Callable[[], None] | None = release
        #: Engine tickets after which the views are valid.
        self.tickets = list(tickets)

    def __getitem__(self, key: str) -> RecordView:
        if self._release is None:
            raise StoreError("the lease was released")
        return self._views[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def release(self) -> None:
        """Unpins the records. Safe to call twice."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True)
class _Request:
    """The records of one layer, and the need of each, in the host cache's form."""

    layer: int
    records: Sequence[LiveRecord]
    numbers: npt.NDArray[np.uint32]
    flags: npt.NDArray[np.uint16]


def _requests(core: StoreCore, keys: Sequence[str], groups: Sequence[Group]) -> list[_Request]:
    """``groups`` of ``keys``, by layer. Raises KeyError, StoreError, and ValueError for unavailable groups."""
    core.failures.check()
    base, reads = Need(0), core.opened_to is StoreAccess.READ
    for group in groups:
        if group not in _NEED:
            raise ValueError(f"groups: expected Group.WEIGHTS or Group.MOMENTS, got {group!r}")
        base |= _NEED[group]
    wanted = [core.record(key) for key in dict.fromkeys(keys)]
    for record in wanted if Group.MOMENTS in groups else ():
        if record.schema.frozen:
            raise ValueError(f"groups: record {record.key!r} is frozen: it has no moments")
        if reads and core.optimizer.behind(record):
            raise StoreError(
                f"record {record.key!r} has missed steps, which a store opened to read replays only on weights: "
                "open the store to write to read its moments"
            )
    requests = []
    for layer, records in by_layer(wanted):
        numbers = np.array([record.number for record in records], np.uint32)
        step = [not reads and core.optimizer.behind(record) > 0 for record in records]
        flags = np.where(step, base | Need.STEP, base).astype(np.uint16)
        requests.append(_Request(layer, records, numbers, flags))
    return requests


def begin_fetch(core: StoreCore, keys: Sequence[str], groups: Sequence[Group]) -> Lease:
    """Pins ``keys`` with ``groups``, caught up with the optimizer; their bytes are valid after the lease's tickets.

    Raises KeyError, ValueError, BudgetError.
    """
    views: dict[str, RecordView] = {}
    tickets: list[int] = []
    pinned: list[_Request] = []

    def unpin() -> None:
        for request in pinned:
            core.cache.unpin(request.numbers, request.flags)

    def release() -> None:
        core.records.leased.subtract(list(views))
        unpin()

    try:
        for request in _requests(core, keys, groups):
            _pin(core, request)
            pinned.append(request)
            for record in request.records:
                sections = {Group(g): core.cache.sections(record.entry(g)) for g in groups}
                views[record.key] = RecordView(record.schema, sections)
                tickets += [ticket for g in groups for ticket in core.cache.ready(record.entry(g))]
    except BaseException:
        unpin()
        raise
    core.records.leased.update(list(views))
    return Lease(views, tickets, release)


def _pin(core: StoreCore, request: _Request) -> None:
    """One access that catches the records up and leaves them pinned. Raises BudgetError if they do not fit at once."""
    count = core.begin_access(Phase.USER, request.layer, request.numbers, request.flags)
    for _ in range(count):
        for item in core.cache.next_group():
            if core.opened_to is StoreAccess.WRITE:  # a reader's cache returns caught-up weights
                core.optimizer.catch_up(request.records[item])
        if count == 1:
            core.cache.residency.pin(request.numbers, request.flags)
        core.cache.end_group()
    if count > 1:
        raise BudgetError(
            f"host_budget: {len(request.records)} records do not fit at once; fetch fewer, or in {count} parts"
        )


def prefetch(core: StoreCore, keys: Sequence[str], groups: Sequence[Group]) -> int:
    """Starts to fetch ``keys`` within the lookahead; returns the number covered. Raises KeyError, ValueError."""
    covered = 0
    for request in _requests(core, keys, groups):
        taken = core.cache.prefetch(Phase.USER, request.layer, request.numbers, request.flags)
        covered += taken
        if taken < len(request.records):
            break
    return covered
