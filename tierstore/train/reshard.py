"""The store of a training run, made over for another number of ranks, or to keep its experts' moments in another format:
dense slices re-cut, experts moved.

An explicit step. The old store stays as it is, but for a commit that was never acknowledged. The new one is built
beside its final name, and takes that name when it is whole. Contents are those of the newest step that every old rank
has, caught up with the optimizer, so training goes on as if it had always had this many ranks (up to the rounding of
other shapes of computation).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore._native import Buffer, Priority
from tierstore.config import from_dict
from tierstore.dense import Fusion, UnitLayout, recut, unit_layouts
from tierstore.errors import ConfigError, StoreExistsError, StoreFormatError
from tierstore.model.config import ModelConfig
from tierstore.model.spec import ModelSpec
from tierstore.moe.source import InMemoryExperts
from tierstore.parallel import ExpertBlocks
from tierstore.store.committing import OWN_STATE
from tierstore.store.config import StoreConfig
from tierstore.store.core import StoreCore
from tierstore.store.directories import building, building_directory, rank_directories, rank_directory
from tierstore.store.disk.home import IDENTITY, MODEL_DIRECTORY, OWN_NAMES, fsync_directory
from tierstore.store.format import Group, MomentFormat, RecordSchema
from tierstore.store.moments import convert_moments
from tierstore.store.opening import minimum_host_budget, read_schemas
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord
from tierstore.store.scratch import scratch_buffers
from tierstore.tiers.device import tensor_of
from tierstore.train.budgets import EXPERT_SCHEMA
from tierstore.train.experts import expert_key
from tierstore.train.ranks import newest_common
from tierstore.train.state import IMPORT_KEY, STATE_KEY, TrainState

Progress = Callable[[int, int], None]

#: Low-rank pairs of experts, and of attention.
_PAIRS = ("lora.", "dense.lora.")


@dataclass(frozen=True)
class Layout:
    """``ranks`` ranks, in expert groups of ``expert_ranks``."""

    ranks: int
    expert_ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"ranks: expected at least 1, got {self.ranks}")
        if self.expert_ranks < 1 or self.ranks % self.expert_ranks:
            raise ConfigError(f"expert_ranks: expected a divisor of {self.ranks}, got {self.expert_ranks}")


@dataclass(frozen=True)
class Resharded:
    """What was done: ``step`` is where training stands, ``nbytes`` what was written."""

    before: Layout
    after: Layout
    step: int
    records: int
    nbytes: int
    moments: MomentFormat


def reshard(
    source: Path,
    target: Path,
    layout: Layout | None = None,
    progress: Progress | None = None,
    *,
    moments: MomentFormat | None = None,
    model: ModelSpec | None = None,
) -> Resharded:
    """Makes at ``target`` the store of ``source`` for ``layout`` (None: as it is). ``progress`` is called with records done
    and in all. ``moments``: how experts' moments are kept there (None: as they are); a narrower format rounds them once.

    ``model``: what the store holds, where that is not the built-in model, which its state describes.

    Raises StoreMissingError, StoreInUseError, StoreExistsError, StoreFormatError, ConfigError, OSError; on a failure
    there is nothing at ``target``.
    """
    if target.exists():
        raise StoreExistsError(f"{target}: there is something here already")
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(_open(source, model))
        layout, moments = layout or old.layout, moments or old.expert_schema.moments
        if old.expert_schema.frozen and moments is not MomentFormat.FP32:
            raise ConfigError(
                f"moments: the experts of {source} are frozen and have none, got {moments.value}"
            )
        partial = building_directory(target)
        _clear_debris(partial)
        partial.mkdir(parents=True)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        stack.enter_context(building(partial))
        written = _Writer(old, layout, moments, partial, progress).run()
        _copy_model(source, partial)
        for path in (partial, *rank_directories(partial)):
            fsync_directory(path)
        partial.rename(target)
        fsync_directory(target.absolute().parent)
    return Resharded(old.layout, layout, old.state.position, *written, moments)


def _clear_debris(partial: Path) -> None:
    """Removes what an earlier attempt left behind. Raises StoreExistsError for anything else of that name."""
    if not partial.exists():
        return
    children = list(partial.iterdir()) if partial.is_dir() else [partial]
    own = OWN_NAMES | {IDENTITY}
    foreign = [path for path in children if path.name not in own and not path.match("rank-[0-9]*")]
    if foreign or not partial.is_dir():
        raise StoreExistsError(
            f"{partial}: needed to build the new store, and there is something of yours in it"
        )
    with building(partial):
        shutil.rmtree(partial)


@dataclass
class _Old:
    """The stores of all old ranks, open at one step."""

    stores: list[ParameterStore]
    layout: Layout
    state: TrainState
    model: ModelSpec
    fusion: Fusion
    layouts: dict[int, list[UnitLayout]] = field(default_factory=dict)

    @property
    def expert_schema(self) -> RecordSchema:
        return next(s for s in self.stores[0].core.extents.schemas if s.name == EXPERT_SCHEMA)

    def cut(self, ranks: int) -> list[UnitLayout]:
        """The dense units as ``ranks`` ranks hold them."""
        if ranks not in self.layouts:
            experts = InMemoryExperts(self.model.expert_shape, layers=(), experts=0)
            model = self.model.build(experts)
            self.layouts[ranks] = unit_layouts(
                model.dense_units(), ranks=ranks, narrow=model.cast_parameters(), fusion=self.fusion
            )
        return self.layouts[ranks]

    def holder(self, expert: int) -> ParameterStore:
        """The store of the first rank that has ``expert``."""
        return self.stores[ExpertBlocks(self.model.experts, self.layout.expert_ranks).owner(expert)]

    def sections(self, key: str, expert: int) -> list[npt.NDArray[np.generic]]:
        """All committed sections of an expert, caught up."""
        store = self.holder(expert)
        with store.fetch([key], store.info(key).schema.groups) as lease:
            return [lease[key].copy(name) for name in lease[key].sections]


@contextlib.contextmanager
def _open(source: Path, model: ModelSpec | None) -> Iterator[_Old]:
    directories = rank_directories(source) or [source]
    at = newest_common(source, directories)
    with contextlib.ExitStack() as stack:
        stores: list[ParameterStore] = []
        for directory, opened_at in zip(directories, at, strict=True):
            budget = 2 * minimum_host_budget(read_schemas(directory))
            stores.append(ParameterStore.open(directory, StoreConfig(host_budget=budget), at=opened_at))
            stack.callback(stores[-1].close)
        state = TrainState.unpack(stores[0].last_commit.state, where=str(directories[0]))
        try:
            parallel, dense = state.conditions["parallel"], state.conditions["dense"]
            if model is None:
                model = from_dict(ModelConfig, state.conditions["model"], origin=str(source))  # type: ignore[arg-type]
            layout = Layout(parallel["ranks"], parallel["expert_ranks"])  # type: ignore[index]
            fusion = Fusion(dense["fusion"])  # type: ignore[index]
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFormatError(f"{source}: the conditions of the run are damaged: {error}") from error
        if layout.ranks != len(stores):
            raise StoreFormatError(
                f"{source}: made by {layout.ranks} ranks, and there are {len(stores)} stores"
            )
        old = _Old(stores, layout, state, model, fusion)
        pair = next((key for key in stores[0].keys if key.startswith(_PAIRS)), None)
        if pair is not None:
            raise StoreFormatError(
                f"{source}: record {pair!r}: low-rank pairs cannot be resharded; tierstore export writes them out"
            )
        dense = {cut.key for cut in old.cut(layout.ranks)}
        other = next(
            (key for key in stores[0].keys if not key.startswith("expert.") and key not in dense), None
        )
        if other is not None:
            raise StoreFormatError(
                f"{source}: record {other!r}: only experts and the dense slices of the model can be resharded"
            )
        yield old


class _Writer:
    """Writes the stores of the new ranks, one after another."""

    def __init__(
        self, old: _Old, layout: Layout, moments: MomentFormat, target: Path, progress: Progress | None
    ) -> None:
        self._old = old
        self._expert_schema = replace(old.expert_schema, moments=moments)
        self._layout = layout
        self._target = target
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        self._nbytes = 0
        units = len(old.cut(layout.ranks))
        copies = layout.ranks // layout.expert_ranks
        experts = len(old.model.moe_layers) * old.model.experts * copies
        self._total = experts + units * layout.ranks

    def run(self) -> tuple[int, int]:
        for rank in range(self._layout.ranks):
            self._write_rank(rank)
        return self._done, self._nbytes

    def _write_rank(self, rank: int) -> None:
        first, model = self._old.stores[0], self._old.model
        cuts = self._old.cut(self._layout.ranks)
        directory = rank_directory(self._target, rank, self._layout.ranks)
        schemas = [self._expert_schema]
        for number, cut in enumerate(cuts):
            if (schema := self._unit_schema(number, cut)) not in schemas:
                schemas.append(schema)
        config = StoreConfig(host_budget=2 * minimum_host_budget(schemas), layers=model.moe_layers)
        with ParameterStore.create(directory, schemas, config, adamw=first.core.adamw) as store:
            store.core.history.unpack(first.core.history.pack())
            for number, cut in enumerate(cuts):
                store.register(cut.key, self._unit_schema(number, cut).name)
            blocks = ExpertBlocks(model.experts, self._layout.expert_ranks)
            for layer in model.moe_layers:
                for expert in blocks.owned(rank % self._layout.expert_ranks):
                    self._write_expert(store, layer, expert)
            held = [self._write_unit(store, number, rank) for number in range(len(cuts))]
            state = replace(self._old.state, conditions=self._conditions(rank))
            # Of an import nothing goes on here: that it has ended is what the training state says.
            dropped = OWN_STATE | {IMPORT_KEY}
            small = {name: value for name, value in first.last_commit.state.items() if name not in dropped}
            store.commit({**small, STATE_KEY: state.pack()})
            del held  # the commit wrote out of their memory

    def _conditions(self, rank: int) -> dict[str, object]:
        parallel = {"ranks": self._layout.ranks, "expert_ranks": self._layout.expert_ranks, "rank": rank}
        return {**self._old.state.conditions, "parallel": parallel}

    def _write_expert(self, store: ParameterStore, layer: int, expert: int) -> None:
        key = expert_key(layer, expert)
        held = self._old.expert_schema
        sections = convert_moments(held, self._old.sections(key, expert), self._expert_schema.moments)
        step = self._old.holder(expert).info(key).step
        store.register_many([NewRecord(key, EXPERT_SCHEMA, layer, sections=lambda: sections, step=step)])
        self._wrote(sections)

    def _write_unit(self, store: ParameterStore, number: int, rank: int) -> list[Buffer]:
        """Writes a rank's record of a unit; its memory must live until the commit."""
        before, after = (
            self._old.cut(ranks)[number] for ranks in (self._old.layout.ranks, self._layout.ranks)
        )
        olds = [_read_unit(old.core, before.key) for old in self._old.stores]
        schema = self._unit_schema(number, after)
        groups: dict[Group, list[Buffer]] = {}
        section = 0
        for group in schema.groups:
            buffers = groups[group] = scratch_buffers(schema.layout(group))
            for buffer in buffers:
                parts = [tensor_of(old[section], torch.float32) for old in olds]

                def read(
                    old_rank: int, offset: int, count: int, parts: list[torch.Tensor] = parts
                ) -> torch.Tensor:
                    return parts[old_rank][offset : offset + count]

                tensor_of(buffer, torch.float32).copy_(recut(before, after, rank, read))
                section += 1
        store.core.write_through(after.key, groups, step=store.core.history.applied)
        written = [buffer for buffers in groups.values() for buffer in buffers]
        self._wrote([buffer.array() for buffer in written])
        return written

    def _unit_schema(self, number: int, cut: UnitLayout) -> RecordSchema:
        """That of the old record, for slices of another size."""
        old = self._old.stores[0].info(cut.key).schema
        return replace(old, name=f"{old.name.rpartition('-')[0]}-{cut.slice_numel}", numel=cut.slice_numel)

    def _wrote(self, sections: Sequence[npt.NDArray[np.generic]]) -> None:
        self._done += 1
        self._nbytes += sum(section.nbytes for section in sections)
        self._progress(self._done, self._total)


def _read_unit(core: StoreCore, key: str) -> list[Buffer]:
    """All sections of a unit's record, in memory of their own."""
    live = core.records.direct(key)
    sections: list[Buffer] = []
    tickets: list[int] = []
    for group in live.schema.groups:
        buffers = scratch_buffers(live.schema.layout(group))
        sections += buffers
        tickets.append(live.read(group, buffers, (), Priority.DEMAND))
    core.wait(tickets)
    return sections


def _copy_model(source: Path, target: Path) -> None:
    """Copies what an import says of its model, if ``source`` is an import's, durably."""
    if not (source / MODEL_DIRECTORY).is_dir():
        return
    shutil.copytree(source / MODEL_DIRECTORY, target / MODEL_DIRECTORY)
    for path in (target / MODEL_DIRECTORY, *(target / MODEL_DIRECTORY).rglob("*")):
        if path.is_dir():
            fsync_directory(path)
            continue
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
