"""Adds records: all checks come before any change; then the records are completed one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Arena, Buffer, HugePages
from tierstore.cache.access import Need, Phase
from tierstore.cache.config import Scope
from tierstore.errors import StoreError
from tierstore.quant.layout import quantize
from tierstore.stats import OnProgress, no_progress
from tierstore.store.core import StoreCore, check_array
from tierstore.store.format import (
    SECTION_ALIGNMENT,
    Group,
    GroupLayout,
    Placement,
    RecordSchema,
    WeightFormat,
)
from tierstore.store.index.live import LiveRecord
from tierstore.store.index.table import check_name

#: When the host budget is nearly full, new records are written back an eighth of it at a time.
_PARTS = 8
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class NewRecord:
    """A record to register. ``weight``: initial weights (float32 [numel], None for zeros), or a callable that makes them.

    A record copied from another store has ``sections`` instead: a callable that makes all of them, in the schema's order,
    as of ``step`` optimizer steps.
    """

    key: str
    schema: str
    layer: int = 0
    weight: Array | Callable[[], Array | None] | None = None
    sections: Callable[[], Sequence[npt.NDArray[np.generic]]] | None = None
    step: int | None = None


def register_many(
    core: StoreCore,
    records: Iterable[NewRecord],
    *,
    threads: int = 1,
    progress: OnProgress = no_progress,
) -> None:
    """Adds ``records``; each gets its content before the next one is added. With several ``threads`` these make the contents
    ahead, running the callables; one content for each thread is in memory. ``progress`` is called with the number of records
    done and the total.

    Raises StoreError, ValueError and OSError (ENOSPC) with nothing changed. If a callable that makes content raises, the
    records before that one are registered; that one and the rest are not.
    """
    core.failures.check_writable("register")
    records = list(records)
    schemas = _check(core, records)
    promised = core.extents.promised
    core.reserve(core.records.counts(schemas))
    # A new record is up to date; if missed steps are dropped, each record counts its own steps, from 0.
    fresh = core.history.applied if core.history.replays else 0
    unwritten: list[int] = []
    nbytes = 0
    try:
        contents = _contents(records, [core.extents.schemas[schema] for schema in schemas], threads)
        for done, (new, schema, content) in enumerate(zip(records, schemas, contents, strict=True), 1):
            progress(done, len(records))
            shape = core.extents.schemas[schema]
            record = core.records.add(new.key, schema, new.layer)
            record.step = fresh if new.step is None else new.step
            if not record.cached:
                continue
            _fill(core, record, content)
            unwritten.append(record.number)
            nbytes += sum(shape.layout(group).slot_bytes for group in shape.groups)
            if nbytes * _PARTS > core.config.host_budget and core.cache.filled > 1 - 2 / _PARTS:
                # Before their eviction: otherwise the next users of their memory would wait for one write after another.
                core.cache.clean(unwritten)
                unwritten, nbytes = [], 0
    except BaseException:
        core.extents.promised = promised  # added records are counted already
        raise


def _check(core: StoreCore, records: Sequence[NewRecord]) -> list[int]:
    """The schema numbers of ``records``. Raises StoreError or ValueError."""
    seen: set[str] = set()
    schemas = []
    for new in records:
        check_name("record", new.key)
        if new.key in core.records or new.key in seen:
            raise StoreError(f"record {new.key!r} exists already")
        seen.add(new.key)
        layers = core.config.layers
        if core.config.cache.scope is Scope.LAYER and new.layer not in layers:
            raise ValueError(
                f"record {new.key!r}: layer {new.layer} has no quota; StoreConfig.layers is {layers}"
            )
        if not 0 <= new.layer <= 0xFFFF:
            raise ValueError(f"record {new.key!r}: expected a layer from 0 to 65535, got {new.layer}")
        schemas.append(core.records.schema_index(new.schema))
        if isinstance(new.weight, np.ndarray):
            check_array(_weight_of(new), new.weight, core.extents.schemas[schemas[-1]].numel)
    return schemas


def _contents(
    records: Sequence[NewRecord], shapes: Sequence[RecordSchema], threads: int
) -> Iterator[list[npt.NDArray[np.generic]]]:
    """``_content`` of each record, in order; several threads make those of the next ones meanwhile."""
    if threads == 1:
        yield from map(_content, records, shapes)
        return
    coming: deque[Future[list[npt.NDArray[np.generic]]]] = deque()
    with ThreadPoolExecutor(threads, "tierstore-contents") as pool:
        try:
            for new, shape in zip(records, shapes, strict=True):
                coming.append(pool.submit(_content, new, shape))
                if len(coming) == threads:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:  # an error, or a caller that wants no more
            for future in coming:
                future.cancel()


def _content(new: NewRecord, shape: RecordSchema) -> list[npt.NDArray[np.generic]]:
    """The leading sections of a new record, none of one that is kept directly; missing ones begin as zeros."""
    if shape.placement is Placement.DIRECT:
        return []
    if new.sections is not None:
        parts = [np.ascontiguousarray(part) for part in new.sections()]
        layout = [section for group in shape.groups for section in shape.layout(group).sections]
        sizes = [section.nbytes for section in layout]
        if [part.nbytes for part in parts] != sizes:
            raise ValueError(
                f"record {new.key!r}: sections of {[part.nbytes for part in parts]} bytes, expected {sizes}"
            )
        return parts
    weight = new.weight() if callable(new.weight) else new.weight
    values = np.zeros(shape.numel, np.float32) if weight is None else weight
    check_array(_weight_of(new), values, shape.numel)
    if shape.weight_format is WeightFormat.FP32:
        return [np.ascontiguousarray(values)]
    if shape.quantized is not None:
        data = np.empty(shape.quantized.nbytes, np.uint8)
        quantize(shape.quantized, values, data, name=_weight_of(new))
        return [data]
    high, low = np.empty(shape.numel, np.uint16), np.empty(shape.numel, np.int16)
    _native.split_bf16(high, low, np.ascontiguousarray(values))
    return [high] if shape.frozen else [high, low]


def _weight_of(new: NewRecord) -> str:
    return f"record {new.key!r}: weight"


def _fill(core: StoreCore, record: LiveRecord, content: Sequence[npt.NDArray[np.generic]]) -> None:
    cache, begun, groups = core.cache, False, record.schema.groups
    need = Need.WEIGHTS | Need.DIRTY_WEIGHTS if record.schema.frozen else Need.STEP
    try:
        for _ in core.access(Phase.INIT, record.layer, [record], need):
            begun = True
            moments = record.entry(Group.MOMENTS)
            sections = [section for group in groups for section in cache.sections(record.entry(group))]
            for group in groups:
                core.wait(cache.before_write(record.entry(group)))
                cache.wrote(record.entry(group), 0)
            for section, part in zip(sections, content, strict=False):
                section.copy_from(part.view(np.uint8))
            for section in sections[len(content) :]:
                cache.wrote(moments, core.engine.fill_zero(section, after=cache.ready(moments)))
    except BaseException as error:
        if begun:
            core.failures.poison(f"registering {record.key!r} was cut short", error)
        else:  # it does not fit beside the leased records
            core.records.remove(record.key)
        raise


_CHUNK = 1 << 20


class RecordLoader:
    """Adds records to an open store, in space reserved before. One caller, between commits."""

    def __init__(self, core: StoreCore) -> None:
        self._core = core
        self._zeros: dict[int, Buffer] = {}
        for number, schema in enumerate(core.extents.schemas):
            for group in schema.groups:
                for extent in core.extents.of(number, group).extents:
                    extent.clear_holes()

    def add(self, key: str, schema: str, layer: int, sections: Sequence[Buffer | None]) -> list[int]:
        """Adds record ``key`` and queues its writes; ``sections`` are all of its committed sections, None for zeros.

        Their memory must not change until the returned tickets have finished. The record is up to date with the store's
        steps. Raises StoreError, with nothing changed.
        """
        core = self._core
        core.failures.check()
        number = core.records.schema_index(schema)
        if key in core.records:
            raise StoreError(f"record {key!r} exists already")
        shape = core.extents.schemas[number]
        layouts = [shape.layout(group) for group in shape.groups]
        sizes = [section.nbytes for layout in layouts for section in layout.sections]
        given = [None if section is None else section.nbytes for section in sections]
        if len(given) != len(sizes) or any(
            has not in (None, size) for has, size in zip(given, sizes, strict=True)
        ):
            raise StoreError(f"record {key!r}: sections of {given} bytes, expected {sizes}")
        live = core.records.add(key, number, layer, stored=True)
        live.step, live.changed = (core.history.applied if core.history.replays else 0), True
        tickets: list[int] = []
        for layout in layouts:
            first, count = layout.first_section, len(layout.sections)
            tickets += self._write(live, layout, sections[first : first + count])
        core.committer.writes += tickets
        return tickets

    def wait(self, tickets: Sequence[int]) -> None:
        """Waits for writes. Raises OSError."""
        self._core.wait(tickets)

    def _write(self, live: LiveRecord, layout: GroupLayout, sections: Sequence[Buffer | None]) -> list[int]:
        slot = live.allocate(layout.group)
        count = len(sections)
        if slot.extent.reads_as_zeros(slot.number):
            while count and sections[count - 1] is None:
                count -= 1
        for section, number in zip(
            layout.sections[count:], range(layout.first_section + count, 1 << 30), strict=False
        ):
            live.set_crc(number, _crc_of_zeros(section.nbytes))
        if not count:
            return []
        written = [
            self._zero(layout.sections[i].nbytes) if section is None else section
            for i, section in enumerate(sections[:count])
        ]
        return [live.write(layout.group, written, ())]

    def _zero(self, nbytes: int) -> Buffer:
        if nbytes not in self._zeros:
            size = -(-nbytes // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
            self._zeros[nbytes] = Buffer(Arena(size, HugePages.AUTO), [(0, size)], nbytes)
        return self._zeros[nbytes]


@cache
def _crc_of_zeros(nbytes: int) -> int:
    zeros, crc = np.zeros(min(nbytes, _CHUNK), np.uint8), 0
    for start in range(0, nbytes, _CHUNK):
        crc = _native.crc32c(zeros[: nbytes - start], crc)
    return crc
