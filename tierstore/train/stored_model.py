"""The logical model in the stores of all ranks: dense parameters, experts and the small state of the newest common step.

``StoredModel`` reads it; ``DenseCut`` gives each rank's portion under a layout: the groups of dense parameters, the parts
of their parameters, the slices.

A parameter group belongs to the stage with its block; the first stage has the embedding, and the last one norm and head.
Tensor-parallel ranks of that stage hold parts of the parameters that ``Division`` names, and the others whole. The data
ranks with the same parts hold one slice each of every region (``tierstore.dense.layout``). ``join`` and ``part`` are the
two directions, for one array at a time: the weights, or one of the moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from tierstore._native import Buffer
from tierstore.dense import Fusion, UnitLayout, recut
from tierstore.dense.layout import Narrow, ParameterPlace, layouts_of_shapes
from tierstore.errors import StoreFormatError
from tierstore.model.spec import BuiltInSpec, ModelSpec, spec_of
from tierstore.model.store_schema import (
    EXPERT_SCHEMA,
    IMPORT_KEY,
    STATE_KEY,
    TrainState,
    reading_conditions,
    recorded_model,
    table_of,
    with_all_buffers,
)
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel.layout import Division, Layout
from tierstore.parallel.tensor import part_of, whole_of
from tierstore.store.committing import OWN_STATE
from tierstore.store.core import StoreCore
from tierstore.store.disk.extents import Scratch, read_ahead
from tierstore.store.disk.home import rank_directories
from tierstore.store.format import RecordSchema
from tierstore.store.parameter_store import ParameterStore, open_to_read
from tierstore.tiers.device import tensor_of
from tierstore.train.ranks import newest_common
from tierstore.train.tasks import own_heads
from tierstore.train.vocabulary import places_of, recorded_placements


@dataclass(frozen=True, slots=True)
class DenseParameter:
    """A whole parameter: its shape, whether it may be sent in bf16, and how tensor-parallel ranks divide it, if they do."""

    shape: tuple[int, ...]
    narrow: Narrow
    division: Division | None = None

    def part_shape(self, ranks: int) -> tuple[int, ...]:
        """The shape of the part of one of ``ranks`` tensor-parallel ranks."""
        return self.shape if self.division is None else self.division.part_shape(self.shape, ranks)


#: The name of a group of dense parameters, and its whole parameters.
DenseGroup = tuple[str, tuple[DenseParameter, ...]]


def coordinates_of(layout: Layout, rank: int) -> tuple[int, int, int]:
    """The stage of ``rank`` in ``layout``, its index among the data ranks, and its index in its tensor-parallel group."""
    stage, within = divmod(rank, layout.replicas * layout.expert)
    return (stage, within, 0) if layout.tensor == 1 else (stage, *divmod(within, layout.expert))


def rank_at(layout: Layout, stage: int, data: int, tensor: int) -> int:
    """The rank with these coordinates."""
    within = data if layout.tensor == 1 else data * layout.expert + tensor
    return stage * layout.replicas * layout.expert + within


class DenseCut:
    """The division of ``groups`` by ``layout``: embedding, blocks, norm and head, in the order of the forward pass, and
    then heads of tasks.

    ``blocks``: those of each stage. ``tables``: parameters whose rows are divided over the data ranks.
    """

    def __init__(
        self,
        groups: Sequence[DenseGroup],
        layout: Layout,
        fusion: Fusion,
        *,
        blocks: Sequence[range],
        tables: Collection[ParameterPlace] = (),
    ) -> None:
        self.layout = layout
        self.blocks = blocks
        self.tables = tables
        self._groups = groups
        self._records = self._layouts(fusion, layout.data)
        #: The same for a single data rank.
        self._whole = self._layouts(fusion, 1)

    def record(self, number: int) -> UnitLayout:
        """The layout of a rank's record of group ``number``, the same on all ranks that have the group."""
        return self._records[number]

    def stage(self, number: int) -> int:
        """The stage of group ``number``."""
        block = min(max(number - 1, 0), self.blocks[-1].stop - 1)
        return next(stage for stage, blocks in enumerate(self.blocks) if block in blocks)

    def groups_of(self, rank: int) -> list[int]:
        """The groups with a record on ``rank``."""
        stage, _, _ = coordinates_of(self.layout, rank)
        return [
            number
            for number in range(len(self._groups))
            if self.stage(number) == stage and not self._records[number].empty
        ]

    def holders(self, number: int) -> list[int]:
        """The ranks with a record of group ``number``."""
        size, stage = self.layout.replicas * self.layout.expert, self.stage(number)
        return list(range(stage * size, (stage + 1) * size))

    def join(self, number: int, read: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        """The whole parameters of group ``number``, fp32; ``read(rank)`` returns the slices of each holder."""
        parts = [self._joined_slices(number, tensor, read) for tensor in range(self.layout.tensor)]
        return [
            parts[0][index]
            if parameter.division is None
            else whole_of([of_rank[index] for of_rank in parts], parameter.division)
            for index, parameter in enumerate(self._groups[number][1])
        ]

    def part(self, number: int, whole: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """The slices of ``rank`` of group ``number``, fp32 [slice_numel], from the whole parameters ``whole``."""
        _, data, tensor = coordinates_of(self.layout, rank)
        own = [
            full
            if parameter.division is None
            else part_of(full, parameter.division, tensor, self.layout.tensor)
            for parameter, full in zip(self._groups[number][1], whole, strict=True)
        ]
        before = self._whole[number]
        flat = torch.zeros(before.slice_numel)
        for _, span, kept, part in before.parts(0):
            flat[kept] = own[span.index].reshape(-1)[part]

        def read(_: int, offset: int, count: int) -> torch.Tensor:
            return flat[offset : offset + count]

        return recut(before, self._records[number], data, read)

    def _joined_slices(
        self, number: int, tensor: int, read: Callable[[int], torch.Tensor]
    ) -> list[torch.Tensor]:
        """The parameters of tensor-parallel rank ``tensor``."""
        before, after, stage = self._records[number], self._whole[number], self.stage(number)
        slices = [read(rank_at(self.layout, stage, data, tensor)) for data in range(self.layout.data)]
        flat = recut(before, after, 0, lambda data, offset, count: slices[data][offset : offset + count])
        found = {span.index: flat[kept].view(span.shape) for _, span, kept, _ in after.parts(0)}
        return [found[index] for index in range(len(found))]

    def _layouts(self, fusion: Fusion, ranks: int) -> list[UnitLayout]:
        tensor = self.layout.tensor
        shapes = [
            (name, [(each.narrow, each.part_shape(tensor)) for each in parameters])
            for name, parameters in self._groups
        ]
        return layouts_of_shapes(shapes, ranks=ranks, fusion=fusion, tables=self.tables if ranks > 1 else ())


# The stores of all ranks, open at one step ------------------------------------------------------------------


#: Low-rank pairs of experts, and of attention.
_PAIRS = ("lora.", "dense.lora.")

#: One array of a parameter group, fp32: the weights, or one of the moments, as whole parameters.
WholeArray = list[torch.Tensor]


@dataclass
class StoredModel:
    """The stores of all ranks of ``layout``, open at one step. ``blocks``: those of each stage. ``conditions``: the
    layout as the stores record it.
    """

    stores: list[ParameterStore]
    layout: Layout
    blocks: list[range]
    conditions: dict[str, object]
    state: TrainState
    model: ModelSpec
    fusion: Fusion
    groups: list[DenseGroup] = field(init=False)
    cut: DenseCut = field(init=False)

    def __post_init__(self) -> None:
        self.groups = [*whole_groups(self.model), *head_groups(self.model, self.state)]
        self.cut = self.cut_as(self.layout, self.blocks, self.conditions)

    def cut_as(self, layout: Layout, blocks: Sequence[range], conditions: Mapping[str, object]) -> DenseCut:
        """The division of the model by ``layout``, with tables placed according to ``conditions``."""
        model = self.model
        placements = recorded_placements(conditions)
        tables = places_of(model.config, placements) if isinstance(model, BuiltInSpec) else []
        return DenseCut(self.groups, layout, self.fusion, blocks=blocks, tables=tables)

    @property
    def expert_schema(self) -> RecordSchema:
        return next(s for s in self.stores[0].core.extents.schemas if s.name == EXPERT_SCHEMA)

    def group_schema(self, number: int) -> RecordSchema:
        """The schema of the records of group ``number``."""
        holder = self.stores[self.cut.holders(number)[0]]
        return holder.info(self.cut.record(number).key).schema

    def group(self, number: int) -> Iterator[WholeArray]:
        """The arrays of group ``number``, in the order of its record's sections."""
        key = self.cut.record(number).key
        held = {rank: self.stores[rank].core.sections(key) for rank in self.cut.holders(number)}
        for section in range(len(next(iter(held.values())))):

            def read(rank: int, section: int = section) -> torch.Tensor:
                return tensor_of(held[rank][section], torch.float32)

            yield self.cut.join(number, read)

    def experts(self, keys: Iterable[str]) -> Iterator[tuple[str, list[npt.NDArray[np.generic]], int]]:
        """``keys`` of experts, all committed sections, caught up and valid until the next, and the step. Reads ahead."""
        schema = self.expert_schema
        sections = [section for group in schema.groups for section in schema.layout(group).sections]

        def begin(key: str, scratch: Scratch) -> tuple[str, StoreCore, list[Buffer], list[int]]:
            core = next((store.core for store in self.stores if key in store.core.records), None)
            if core is None:
                raise StoreFormatError(f"record {key!r} is in none of the {len(self.stores)} stores")
            return key, core, *core.queue_sections(key, scratch)

        for key, core, buffers, tickets in read_ahead(keys, lambda key: schema.nbytes, begin):
            core.wait(tickets)
            views = zip(buffers, sections, strict=True)
            behind = core.optimizer.behind(core.record(key)) > 0
            step = core.history.applied if behind else core.record(key).step
            yield key, [buffer.array().view(section.dtype) for buffer, section in views], step

    def small_state(self) -> dict[str, bytes]:
        """The state in a commit beside the records, without that of the individual store and the training position."""
        # The new store does not continue an import: the training state records that it has ended.
        dropped = OWN_STATE | {IMPORT_KEY, STATE_KEY}
        firsts = self.stores[:: self.layout.replicas * self.layout.expert]
        whole = with_all_buffers(
            [store.last_commit.state for store in firsts], where=str(firsts[0].core.directory)
        )
        return {name: value for name, value in whole.items() if name not in dropped}


class _Undrawn(TorchFunctionMode):
    """Draws no first values, so that memory is reserved and not touched: for the meta device torch loads its compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return None if func is torch.nn.init.normal_ else func(*args, **(kwargs or {}))


def whole_groups(model: ModelSpec) -> list[DenseGroup]:
    """The dense parameters of ``model`` in a single process. Those of the built-in model take no memory."""
    with _Undrawn() if isinstance(model, BuiltInSpec) else contextlib.nullcontext():
        built = model.build(InMemoryExperts(model.expert_shape, layers=(), experts=0))
    narrow = {id(parameter) for parameter in built.cast_parameters()}
    return [
        (
            name,
            tuple(
                DenseParameter(
                    tuple(parameter.shape),
                    Narrow.YES if id(parameter) in narrow else Narrow.NO,
                    division,
                )
                for parameter, division in zip(parameters, divided, strict=True)
            ),
        )
        for (name, parameters), divided in zip(built.dense_units(), built.unit_divisions(), strict=True)
    ]


def head_groups(model: ModelSpec, state: TrainState) -> list[DenseGroup]:
    """The output heads of tasks with their own, currently trained or not."""
    head = DenseParameter((model.vocab_size, model.d_model), Narrow.NO)
    return [(f"head.{name}", (head,)) for name in own_heads(state.tasks)]


@contextlib.contextmanager
def open_stored(source: Path, model: ModelSpec | None = None) -> Iterator[StoredModel]:
    """The stores of the job in ``source``, as of the newest step that every rank has.

    ``model``: their model, except for the built-in model, which their state describes. Raises
    StoreMissingError, StoreInUseError, StoreFormatError, OSError.
    """
    with open_ranks(source) as (stores, state, layout):
        model = model or spec_of(recorded_model(state, where=str(source)))
        fusion = stored_fusion(state, where=str(source))
        blocks = _stored_blocks(model, layout, stores)
        parallel = table_of(state.conditions["parallel"])
        stored = StoredModel(stores, layout, blocks, parallel, state, model, fusion)
        _check_records(source, stored)
        yield stored


@contextlib.contextmanager
def open_ranks(source: Path) -> Iterator[tuple[list[ParameterStore], TrainState, Layout]]:
    """The stores of all ranks of the job in ``source``, as of the newest step that every rank has; the first one's state,
    and their layout. Raises StoreMissingError, StoreInUseError, StoreFormatError, StoreError, OSError.
    """
    directories = rank_directories(source) or [source]
    at = newest_common(source, directories)
    with contextlib.ExitStack() as stack:
        stores: list[ParameterStore] = []
        for directory, opened_at in zip(directories, at, strict=True):
            stores.append(open_to_read(directory, opened_at))
            stack.callback(stores[-1].close)
        state = TrainState.unpack(stores[0].last_commit.state, where=str(directories[0]))
        layout = stored_layout(state, where=str(source))
        if layout.world != len(stores):
            raise StoreFormatError(
                f"{source}: made by {layout.world} ranks, but {len(stores)} stores are here"
            )
        yield stores, state, layout


def stored_layout(state: TrainState, *, where: str) -> Layout:
    """The layout in the conditions of the store at ``where``. Raises StoreFormatError."""

    def count(name: str, implied: int | None = None) -> int:
        value = parallel[name] if implied is None else parallel.get(name, implied)
        if not isinstance(value, int):
            raise TypeError(f"parallel.{name}: expected a number, found {value!r}")
        return value

    with reading_conditions(where):
        parallel = table_of(state.conditions["parallel"])
        stages, expert = count("stages", 1), count("expert_ranks")
        return Layout(stages, count("ranks") // (stages * expert), expert, count("tensor_ranks", 1))


def stored_fusion(state: TrainState, *, where: str) -> Fusion:
    """The fusion in the conditions of the store at ``where``. Raises StoreFormatError."""
    with reading_conditions(where):
        return Fusion(str(table_of(state.conditions["dense"])["fusion"]))


def _stored_blocks(model: ModelSpec, layout: Layout, stores: Sequence[ParameterStore]) -> list[range]:
    """The blocks of each stage, as recorded by its ranks. Raises StoreFormatError."""
    count = model.architecture.blocks
    if layout.stages == 1:
        return [range(count)]
    found = []
    for rank in range(0, layout.world, layout.replicas * layout.expert):
        where = str(stores[rank].core.directory)
        state = TrainState.unpack(stores[rank].last_commit.state, where=where)
        with reading_conditions(where):
            layers: Any = table_of(state.conditions["parallel"])["layers"]
            start, stop = layers
            found.append(range(start, stop))
    if [block for blocks in found for block in blocks] != list(range(count)):
        raise StoreFormatError(
            f"{stores[0].core.directory.parent}: the stages have the blocks {found}, expected all {count}"
        )
    return found


def _check_records(source: Path, stored: StoredModel) -> None:
    """Raises StoreFormatError for records that cannot be resharded, or missing ones."""
    for rank, store in enumerate(stored.stores):
        dense = {stored.cut.record(number).key for number in stored.cut.groups_of(rank)}
        for key in store.keys:
            if key.startswith(_PAIRS):
                raise StoreFormatError(
                    f"{source}: record {key!r}: low-rank pairs cannot be resharded; tierstore export writes them out"
                )
            if not key.startswith("expert.") and key not in dense:
                raise StoreFormatError(
                    f"{source}: record {key!r}: only experts and the dense slices of the model can be resharded"
                )
        missing = next((key for key in sorted(dense) if key not in store.core.records), None)
        if missing is not None:
            raise StoreFormatError(f"{source}: rank {rank} has no record {missing!r}")
