"""Fills a store with the records of a checkpoint: experts and dense slices are read ahead while earlier ones are written.

Reader threads read single tensors, check them and bring them into the form of the record; the calling thread adds records
and queues their writes, in one order, so that memory, commits and the slot of every record are the same each time.
Memory holds a ring of experts within a budget, and one rank's slices of one dense unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierstore import _native
from tierstore._native import Buffer
from tierstore.dense.layout import UnitLayout
from tierstore.dense.slices import schema_name
from tierstore.hf.checkpoint import WINDOW_BYTES
from tierstore.hf.families import Part
from tierstore.hf.manifest import ParameterEntry
from tierstore.hf.weights import WeightReader
from tierstore.model.store_schema import EXPERT_SCHEMA
from tierstore.quant.layout import quantize
from tierstore.store.disk.extents import scratch_buffers
from tierstore.store.format import Group, GroupLayout, RecordSchema, Section, WeightFormat
from tierstore.store.registering import RecordLoader

#: Number of reader threads, and of experts in memory beyond those being read.
READERS = 4
_AHEAD = 4
#: Values of a dense parameter that one thread reads at once.
_DENSE_VALUES = 4 << 20
#: Values that are split at once into a bf16 value and a remainder.
_SPLIT_VALUES = 1 << 20


@dataclass(frozen=True)
class ExpertJob:
    """One expert to import: the key of its record, its tensors in the record's order, and the bytes to read of them."""

    key: str
    layer: int
    parts: Sequence[Part]
    nbytes: int


@dataclass(frozen=True)
class UnitJob:
    """One rank's slices of a dense unit to import; ``nbytes`` to read, but for rounding."""

    layout: UnitLayout
    parameters: Sequence[ParameterEntry]
    rank: int
    nbytes: int

    @property
    def key(self) -> str:
        return self.layout.key


Job = ExpertJob | UnitJob


def _filled(schema: RecordSchema) -> GroupLayout:
    """The sections of a record that are not zero: its weights, and what bf16 loses of them."""
    sections = [section for group in schema.groups for section in schema.layout(group).sections]
    count = 2 if schema.weight_format is WeightFormat.SPLIT_BF16 else 1
    return GroupLayout(Group.WEIGHTS, tuple(sections[:count]), 0)


class _ExpertBuffers:
    """Memory for one expert in the form of its record: the leading section of its weights, and a remainder."""

    def __init__(self, schema: RecordSchema) -> None:
        self._buffers = scratch_buffers(_filled(schema))
        self._sections = sum(len(schema.layout(group).sections) for group in schema.groups)
        self._quantized = schema.quantized
        self._bf16 = schema.weight_format in (WeightFormat.BF16, WeightFormat.SPLIT_BF16)
        self._exact = False
        #: Writes out of this memory.
        self.tickets: list[int] = []

    @staticmethod
    def nbytes(schema: RecordSchema) -> int:
        """Bytes of one, with the fp32 weights that are quantised while it is filled."""
        wide = 0 if schema.quantized is None else 4 * schema.numel
        return wide + _filled(schema).slot_bytes

    def fill(self, key: str, parts: Sequence[Part], weights: WeightReader) -> None:
        """Reads the expert of record ``key``. Raises DataError, OSError."""
        first = self._buffers[0].array()
        if self._quantized is not None:
            wide = np.empty(self._quantized.numel, np.float32)
            for part in parts:
                weights.read_fp32(part, 0, part.numel, wide[part.offset : part.offset + part.numel])
            quantize(self._quantized, wide, first, name=f"record {key!r}")
            return
        self._exact = self._bf16
        for part in parts:
            begin, end = part.offset, part.offset + part.numel
            if not self._bf16:
                weights.read_fp32(part, 0, part.numel, first.view(np.float32)[begin:end])
            elif weights.is_bf16(part.source):
                weights.read_bf16(part, 0, part.numel, first.view(np.uint16)[begin:end])
                self._remainder(begin, end)[:] = 0
            else:
                self._exact = False
                for low in range(0, part.numel, _SPLIT_VALUES):
                    high = min(low + _SPLIT_VALUES, part.numel)
                    wide = np.empty(high - low, np.float32)
                    weights.read_fp32(part, low, high, wide)
                    bits = first.view(np.uint16)[begin + low : begin + high]
                    _native.split_bf16(bits, self._remainder(begin + low, begin + high), wide)

    def _remainder(self, begin: int, end: int) -> npt.NDArray[np.int16]:
        """Memory for the remainders that bf16 loses; a frozen record does not keep them."""
        if len(self._buffers) == 1:
            return np.empty(end - begin, np.int16)
        return self._buffers[1].array().view(np.int16)[begin:end]

    @property
    def sections(self) -> list[Buffer | None]:
        """The sections of the record; zeros are None."""
        kept: list[Buffer | None] = list(self._buffers[:1] if self._exact else self._buffers)
        return kept + [None] * (self._sections - len(kept))


def ring_size(expert: RecordSchema, budget: int) -> int:
    """The most experts in memory at once: as many as ``budget`` bytes hold, at least two, and no more than threads use."""
    return min(max(budget // _ExpertBuffers.nbytes(expert), 2), READERS + _AHEAD)


def held_bytes(expert: RecordSchema, jobs: Iterable[Job], budget: int) -> dict[str, int]:
    """What a ``Filler`` of ``jobs`` holds, in bytes by part."""
    jobs = list(jobs)
    units = [4 * job.layout.slice_numel for job in jobs if isinstance(job, UnitJob)]
    read = max((job.nbytes for job in jobs), default=0)  # a reader takes no more than a job has
    return {
        "experts": ring_size(expert, budget) * _ExpertBuffers.nbytes(expert),
        "dense parameters": max(units, default=0),
        "readers": READERS * (min(WINDOW_BYTES, read) + 4 * min(_SPLIT_VALUES, read)),
    }


class Filler:
    """Adds the records of jobs to a store, in their order. A context manager: leaving it ends the threads."""

    def __init__(
        self,
        loader: RecordLoader,
        weights: WeightReader,
        expert: RecordSchema,
        *,
        budget: int,
        wrote: Callable[[Job], None] = lambda job: None,
    ) -> None:
        """``budget``: bytes for experts in memory; at least two are. ``wrote`` is called with each job whose writes have
        been queued: the store may be committed in it.
        """
        self._loader = loader
        self._weights = weights
        self._wrote = wrote
        self._expert = expert
        self._most = ring_size(expert, budget)
        self._free: deque[_ExpertBuffers] = deque()
        self._made = 0
        self._pending: deque[tuple[ExpertJob, _ExpertBuffers, Future[None]]] = deque()
        #: The last dense unit's memory, and the writes out of it.
        self._unit: tuple[Buffer | None, list[int]] = (None, [])
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="import")

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *args: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, jobs: Iterable[Job]) -> None:
        """Raises DataError naming a tensor, OSError; records that were added until then can be committed."""
        for job in jobs:
            if isinstance(job, UnitJob):
                self._add_unit(job)
            else:
                buffers = self._take()
                self._pending.append(
                    (job, buffers, self._pool.submit(buffers.fill, job.key, job.parts, self._weights))
                )
        while self._pending:
            self._retire()
        self._free_unit()

    # Experts ------------------------------------------------------------------------------------------------

    def _take(self) -> _ExpertBuffers:
        """Memory for one more expert; waits until the writes out of it have ended."""
        while self._pending and (self._pending[0][2].done() or not (self._free or self._made < self._most)):
            self._retire()
        if self._made < self._most:
            self._made += 1
            return _ExpertBuffers(self._expert)
        buffers = self._free.popleft()
        self._loader.wait(buffers.tickets)
        buffers.tickets = []
        return buffers

    def _retire(self) -> None:
        job, buffers, read = self._pending.popleft()
        read.result()
        buffers.tickets = self._loader.add(job.key, EXPERT_SCHEMA, job.layer, buffers.sections)
        self._free.append(buffers)
        self._wrote(job)

    # Dense units --------------------------------------------------------------------------------------------

    def _add_unit(self, job: UnitJob) -> None:
        """Reads a unit, when the one before it is written, and queues its write."""
        self._free_unit()
        layout = job.layout
        slices = Section("weight", "<f4", layout.slice_numel)
        (buffer,) = scratch_buffers(GroupLayout(Group.WEIGHTS, (slices,), 0))
        values = buffer.array().view(np.float32)
        reads = []
        for part, begin, end, target in _pieces(job):
            out = values[target : target + end - begin]
            reads.append(self._pool.submit(self._weights.read_fp32, part, begin, end, out))
        for read in reads:
            read.result()
        sections = [buffer] if self._expert.frozen else [buffer, None, None]
        schema = schema_name(layout, self._expert.training)
        tickets = self._loader.add(layout.key, schema, 0, sections)
        self._unit = (buffer, tickets)
        self._wrote(job)

    def _free_unit(self) -> None:
        self._loader.wait(self._unit[1])
        self._unit = (None, [])


def _pieces(job: UnitJob) -> Iterator[tuple[Part, int, int, int]]:
    """(parameter, its values [begin, end), where they lie in the rank's slices), in runs that one thread reads."""
    for region, kept in job.layout.slices():
        start = job.rank * region.slice_numel
        for span in region.spans:
            low = max(span.offset, start)
            high = min(span.offset + span.numel, start + region.slice_numel)
            for begin in range(low, high, _DENSE_VALUES):
                end = min(begin + _DENSE_VALUES, high)
                yield (
                    Part.whole(job.parameters[span.index]),
                    begin - span.offset,
                    end - span.offset,
                    kept.start + begin - start,
                )
