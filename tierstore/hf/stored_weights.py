"""Reads the weights of a job that is not running from the stores of all its ranks, at the newest step that all have.

Reading changes no record and no file. Steps that an expert missed are replayed on a copy, which is then dropped.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from tierstore import _native
from tierstore._native import Buffer, Priority
from tierstore.dense import UnitLayout
from tierstore.errors import StoreFormatError
from tierstore.hf.checkpoint import WINDOW_BYTES
from tierstore.hf.weights import Bits, Floats, round_bf16, widen_bf16
from tierstore.machine import MemoryAccount
from tierstore.model.store_schema import TrainState, expert_key, with_all_buffers
from tierstore.quant.layout import dequantize
from tierstore.store.core import StoreCore
from tierstore.store.disk.extents import Scratch, ahead_bytes, read_ahead, scratch_buffers
from tierstore.store.format import Group, GroupLayout, Placement, RecordSchema, WeightFormat
from tierstore.store.index.live import LiveRecord
from tierstore.train.stored_model import open_ranks


class ExpertRequest(NamedTuple):
    """An expert to be read: its masters, or the weights of a forward pass."""

    layer: int
    expert: int
    masters: bool


class Adjustment(Protocol):
    """Changes exported weights, for example to merge an adapter. Arrays are fp32 and flat, changed in place."""

    def expert(self, layer: int, expert: int, weights: Floats) -> None: ...
    def dense(self, name: str, weights: Floats) -> None: ...


class ModelWeights(Protocol):
    """The weights of a model as an export reads them; see ``StoredWeights`` for shapes."""

    @property
    def small(self) -> Mapping[str, bytes]: ...
    def expect(self, order: Sequence[ExpertRequest]) -> None: ...
    def expert_fp32(self, layer: int, expert: int) -> Floats: ...
    def expert_bf16(self, layer: int, expert: int) -> Bits: ...
    def dense(self, layout: UnitLayout, index: int) -> Iterator[Floats]: ...


@dataclass(frozen=True, slots=True)
class _Located:
    """The ``groups`` to read of a record in the store of its rank; ``behind``: whether it has missed steps."""

    core: StoreCore
    live: LiveRecord
    groups: Sequence[Group]
    behind: bool

    def nbytes(self) -> int:
        return sum(self.live.schema.layout(group).slot_bytes for group in self.groups)

    def read(self, scratch: Scratch) -> tuple[_Located, list[Buffer], list[int]]:
        """Queues the read, and the replay of missed steps, in memory of ``scratch``: the sections, and the tickets to wait
        for.
        """
        sections: list[Buffer] = []
        tickets: list[int] = []
        for group in self.groups:
            into = scratch(self.live.schema.layout(group))
            sections += into
            tickets.append(self.live.read(group, into, (), Priority.DEMAND))
        if self.behind:
            tickets = [self.core.optimizer.replay_copy(self.live, sections, after=tickets)]
        return self, sections, tickets


@dataclass
class StoredWeights:
    """The stores of a job, open at one step; each of the ``stages`` pipeline stages has equally many."""

    stores: list[StoreCore]
    state: TrainState
    #: The state in the first rank's commit, with the buffers of all stages.
    small: Mapping[str, bytes]
    stages: int = 1
    _scratch: dict[GroupLayout, list[Buffer]] = field(default_factory=dict)
    #: The records that are expected, and their reads.
    _expected: deque[tuple[str, bool]] = field(default_factory=deque)
    _reads: Iterator[tuple[_Located, list[Buffer], list[int]]] = field(default_factory=lambda: iter(()))
    _unit: tuple[str, list[Floats]] = ("", [])

    @property
    def data_ranks(self) -> int:
        """The number of ranks of a stage; each has a slice of its dense units."""
        return len(self.stores) // self.stages

    def _stage_of(self, key: str) -> list[StoreCore]:
        """The stores of the stage that has record ``key``; those of the first stage if none has it."""
        count = self.data_ranks
        stages = [self.stores[begin : begin + count] for begin in range(0, len(self.stores), count)]
        return next((stage for stage in stages if any(key in core.records for core in stage)), stages[0])

    def account(self, process: int) -> MemoryAccount:
        """What an export of the weights will hold. ``process``: bytes that the process held before the stores were open."""
        experts, dense, caches = list[tuple[int, int]](), [0], 0
        for core in self.stores:
            caches += core.arena.nbytes
            counts = core.records.counts()
            for schema in core.extents.schemas:
                if schema.placement is Placement.CACHED:
                    experts.append((schema.nbytes * counts[schema.name], schema.nbytes))
                else:
                    dense.append(schema.layout(Group.WEIGHTS).slot_bytes)
        total, largest = sum(nbytes for nbytes, _ in experts), max((each for _, each in experts), default=0)
        return MemoryAccount(
            {
                "process": process,
                "host caches": caches,
                "reads ahead": ahead_bytes(total, largest),
                "an expert, converted": largest,
                "dense parameters": 2 * max(dense) * self.data_ranks,
                "buffers of files": 2 * WINDOW_BYTES,
            }
        )

    # Experts ------------------------------------------------------------------------------------------------

    def expert_fp32(self, layer: int, expert: int) -> Floats:
        """All weights of an expert, flat, valid until the next one is read: the masters, or a frozen record's weights.
        Raises ChecksumError, StoreFormatError, OSError.
        """
        return self.record_fp32(expert_key(layer, expert))

    def record_fp32(self, key: str) -> Floats:
        """The weights of record ``key``, an expert's or those of its pairs: as ``expert_fp32``."""
        schema, sections = self._record(key, masters=True)
        weight = sections[0].array()
        if schema.weight_format is WeightFormat.FP32:
            return weight.view(np.float32)
        if schema.quantized is not None:
            return dequantize(schema.quantized, weight)
        if schema.frozen:
            return widen_bf16(weight.view(np.uint16))
        wide = np.empty(schema.numel, np.float32)
        _native.merge_bf16(wide, weight.view(np.uint16), sections[1].array().view(np.int16))
        return wide

    def expert_bf16(self, layer: int, expert: int) -> Bits:
        """As bf16 bits: the weights that a forward pass uses, or the masters rounded to nearest even."""
        schema, sections = self._record(expert_key(layer, expert), masters=False)
        weight = sections[0].array()
        if schema.quantized is not None:
            return round_bf16(dequantize(schema.quantized, weight))
        wide = schema.weight_format is WeightFormat.FP32
        return round_bf16(weight.view(np.float32)) if wide else weight.view(np.uint16)

    def expect(self, order: Sequence[ExpertRequest]) -> None:
        """The experts that will be requested next, in this order: they are read ahead. Any other record is read when it is
        requested.
        """
        self._expected = deque((expert_key(layer, expert), masters) for layer, expert, masters in order)
        located = (self._locate(key, masters) for key, masters in tuple(self._expected))
        self._reads = read_ahead(located, _Located.nbytes, _Located.read)

    def _record(self, key: str, *, masters: bool) -> tuple[RecordSchema, list[Buffer]]:
        """The sections of the weights, and of the moments if the masters or missed steps need them."""
        if self._expected and self._expected[0] == (key, masters):
            self._expected.popleft()
            located, sections, tickets = next(self._reads)
        else:
            located, sections, tickets = self._locate(key, masters).read(self._own_scratch)
        located.core.wait(tickets)
        return located.live.schema, sections

    def _locate(self, key: str, masters: bool) -> _Located:
        # Of the copies that data-parallel ranks hold, which are equal, the first.
        core = next((core for core in self.stores if key in core.records), self.stores[0])
        live = _live(core, key)
        schema, behind = live.schema, core.optimizer.behind(live) > 0
        whole = behind or (masters and schema.weight_format is WeightFormat.SPLIT_BF16)
        return _Located(core, live, schema.groups if whole else schema.groups[:1], behind)

    def _own_scratch(self, layout: GroupLayout) -> list[Buffer]:
        if layout not in self._scratch:
            self._scratch[layout] = scratch_buffers(layout)
        return self._scratch[layout]

    # Dense parameters ---------------------------------------------------------------------------------------

    def dense(self, layout: UnitLayout, index: int) -> Iterator[Floats]:
        """Parameter ``index`` of a unit, flat, in pieces; the unit stays in memory until another is read.

        Raises ChecksumError, StoreFormatError, OSError.
        """
        slices = self._slices(layout)
        for region, kept in layout.slices():
            for span in region.spans:
                if span.index != index:
                    continue
                for rank, own in enumerate(slices):
                    begin = rank * region.slice_numel
                    low = max(span.offset, begin)
                    high = min(span.offset + span.numel, begin + region.slice_numel)
                    if low < high:
                        yield own[kept.start + low - begin : kept.start + high - begin]

    def _slices(self, layout: UnitLayout) -> list[Floats]:
        if self._unit[0] != layout.key:
            self._unit = ("", [])  # frees its memory first
            self._unit = (layout.key, [self._slice(core, layout) for core in self._stage_of(layout.key)])
        return self._unit[1]

    def _slice(self, core: StoreCore, layout: UnitLayout) -> Floats:
        live = _live(core, layout.key)
        if live.schema.numel != layout.slice_numel:
            raise StoreFormatError(
                f"{core.directory}: record {layout.key!r} has {live.schema.numel} values, expected {layout.slice_numel}"
            )
        sections = scratch_buffers(live.schema.layout(Group.WEIGHTS))
        core.wait([live.read(Group.WEIGHTS, sections, (), Priority.DEMAND)])
        array = sections[0].array()
        wide = live.schema.weight_format is WeightFormat.FP32
        return array.view(np.float32) if wide else widen_bf16(array.view(np.uint16))


def _live(core: StoreCore, key: str) -> LiveRecord:
    try:
        return core.records.live(key)
    except KeyError as error:
        raise StoreFormatError(f"{core.directory}: record {key!r} is missing") from error


@contextlib.contextmanager
def open_weights(source: Path) -> Iterator[StoredWeights]:
    """The stores of the job in ``source``, of one rank or many, as of the newest step that every rank has.

    Raises StoreMissingError, StoreInUseError, StoreFormatError, StoreError, OSError.
    """
    with open_ranks(source) as (stores, state, layout):
        if layout.tensor != 1:
            raise StoreFormatError(
                f"{source}: made by tensor-parallel ranks; tierstore reshard {source} --to NEW --ranks 1 makes a store that "
                "can be exported"
            )
        cores = [store.core for store in stores]
        states = [core.committer.state for core in cores[:: len(cores) // layout.stages]]
        small = with_all_buffers(states, where=str(source))
        yield StoredWeights(cores, state, small, layout.stages)
