"""Reads the weights of a job that is not running from the stores of all its ranks, at the newest step that all have.

Reading changes no record and no file. Steps that an expert missed are replayed on a copy, which is then dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from tierstore import _native
from tierstore._native import Buffer, Priority
from tierstore.dense import UnitLayout
from tierstore.errors import StoreFormatError
from tierstore.hf.weights import Bits, Floats, round_bf16, widen_bf16
from tierstore.model.store_schema import TrainState, expert_key, with_all_buffers
from tierstore.parallel import ExpertBlocks
from tierstore.quant.layout import dequantize
from tierstore.store.core import StoreCore
from tierstore.store.disk.extents import scratch_buffers
from tierstore.store.format import Group, RecordSchema, WeightFormat
from tierstore.store.index.live import LiveRecord
from tierstore.train.stored_model import open_ranks


class Adjustment(Protocol):
    """Changes exported weights, for example to merge an adapter. Arrays are fp32 and flat, changed in place."""

    def expert(self, layer: int, expert: int, weights: Floats) -> None: ...
    def dense(self, name: str, weights: Floats) -> None: ...


class ModelWeights(Protocol):
    """The weights of a model as an export reads them; see ``StoredWeights`` for shapes."""

    @property
    def small(self) -> Mapping[str, bytes]: ...
    def expert_fp32(self, layer: int, expert: int, experts: int) -> Floats: ...
    def expert_bf16(self, layer: int, expert: int, experts: int) -> Bits: ...
    def dense(self, layout: UnitLayout, index: int) -> Iterator[Floats]: ...


@dataclass
class StoredWeights:
    """The stores of a job, open at one step; each of the ``stages`` pipeline stages has equally many."""

    stores: list[StoreCore]
    state: TrainState
    #: The state in the first rank's commit, with the buffers of all stages.
    small: Mapping[str, bytes]
    expert_ranks: int
    stages: int = 1
    _scratch: dict[tuple[str, Group], list[Buffer]] = field(default_factory=dict)
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

    # Experts ------------------------------------------------------------------------------------------------

    def expert_fp32(self, layer: int, expert: int, experts: int) -> Floats:
        """All weights of an expert (of ``experts`` in its layer), flat, valid until the next one is read: the masters, or
        a frozen record's weights. Raises ChecksumError, StoreFormatError, OSError.
        """
        return self.record_fp32(expert_key(layer, expert), expert, experts)

    def record_fp32(self, key: str, expert: int, experts: int) -> Floats:
        """The weights of record ``key``, which is with ``expert``: as ``expert_fp32``."""
        schema, sections = self._record(key, expert, experts, masters=True)
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

    def expert_bf16(self, layer: int, expert: int, experts: int) -> Bits:
        """As bf16 bits: the weights that a forward pass uses, or the masters rounded to nearest even."""
        schema, sections = self._record(expert_key(layer, expert), expert, experts, masters=False)
        weight = sections[0].array()
        if schema.quantized is not None:
            return round_bf16(dequantize(schema.quantized, weight))
        wide = schema.weight_format is WeightFormat.FP32
        return round_bf16(weight.view(np.float32)) if wide else weight.view(np.uint16)

    def _record(
        self, key: str, expert: int, experts: int, *, masters: bool
    ) -> tuple[RecordSchema, list[Buffer]]:
        """The sections of the weights, and of the moments if the masters or missed steps need them."""
        core = self._stage_of(key)[ExpertBlocks(experts, self.expert_ranks).owner(expert)]
        live = _live(core, key)
        schema, behind = live.schema, core.optimizer.behind(live) > 0
        groups = schema.groups[:1]
        if behind or (masters and schema.weight_format is WeightFormat.SPLIT_BF16):
            groups = schema.groups
        sections: list[Buffer] = []
        tickets: list[int] = []
        for group in groups:
            if (schema.name, group) not in self._scratch:
                self._scratch[schema.name, group] = scratch_buffers(schema.layout(group))
            into = self._scratch[schema.name, group]
            sections += into
            tickets.append(live.read(group, into, (), Priority.DEMAND))
        if behind:
            tickets = [core.optimizer.replay_copy(live, sections, after=tickets)]
        core.wait(tickets)
        return schema, sections

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
        yield StoredWeights(cores, state, small, layout.expert, layout.stages)
