"""Reshards the store of a training run for another layout of ranks; ``--resume`` then continues from the new store.

The layouts may differ in stages, copies of the experts, expert groups and tensor parallelism. The logical model (the
whole dense parameters with both moments, and each expert's record) is read from the old ranks' stores and cut for the new
ranks, bit for bit, with one group of dense parameters and a few experts in memory at a time. The old store does not
change, except that a commit that was never acknowledged is dropped. The new store is built beside its final name, and
renamed when it is complete. It holds the newest step that every old rank has, caught up with the optimizer: training
continues as if it had always had this layout (up to the rounding of other shapes of computation).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierstore.errors import ConfigError, StoreExistsError
from tierstore.machine import MemoryAccount, resident_bytes, working_bytes
from tierstore.model.config import TieEmbeddings, check_divisible
from tierstore.model.spec import BuiltInSpec, ModelSpec
from tierstore.model.store_schema import EXPERT_SCHEMA, STATE_KEY, expert_key
from tierstore.parallel import ExpertBlocks
from tierstore.parallel.config import RowPlacement
from tierstore.parallel.layout import Layout
from tierstore.stats import OnProgress, no_progress
from tierstore.store.adamw import convert_moments
from tierstore.store.config import StoreConfig
from tierstore.store.disk.extents import ahead_bytes, scratch_buffers
from tierstore.store.disk.home import (
    IDENTITY,
    MODEL_DIRECTORY,
    OWN_NAMES,
    building,
    building_directory,
    fsync_directory,
    rank_directories,
    rank_directory,
)
from tierstore.store.format import MomentFormat, RecordSchema
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.registering import NewRecord
from tierstore.tiers.device import tensor_of
from tierstore.train.stages import stage_blocks
from tierstore.train.stored_model import DenseCut, StoredModel, coordinates_of, open_stored
from tierstore.train.vocabulary import recorded_placements


@dataclass(frozen=True)
class Resharded:
    """The result of ``reshard``: the training ``step`` of the new store, the ``nbytes`` written, and the ``account`` of what
    the process was to hold.
    """

    before: Layout
    after: Layout
    step: int
    records: int
    nbytes: int
    moments: MomentFormat
    account: MemoryAccount


def reshard(
    source: Path,
    target: Path,
    layout: Layout | None = None,
    progress: OnProgress = no_progress,
    *,
    embedding: RowPlacement | None = None,
    head: RowPlacement | None = None,
    moments: MomentFormat | None = None,
    model: ModelSpec | None = None,
    stage_blocks: Sequence[int] = (),
    announced: Callable[[MemoryAccount], None] = lambda account: None,
) -> Resharded:
    """Writes the store of ``source`` to ``target``, divided for ``layout`` (None: the same). ``progress`` is called with
    the bytes written and in all, ``announced`` with what the process will hold. ``embedding`` and ``head``: how the new
    stores hold the rows of these tables, GATHERED or PARTITIONED (None: as the old ones); a tied head is the embedding.
    ``moments``: the format of experts' moments (None: the same); a narrower format rounds them once.

    ``model``: the specification of an imported model (None: the built-in model, which the store's state describes).
    ``stage_blocks``: the number of blocks of each stage (none: the same as before, or balanced by cost).

    Raises StoreMissingError, StoreInUseError, StoreExistsError, StoreFormatError, ConfigError, OSError; on a failure
    nothing is left at ``target``.
    """
    if RowPlacement.AUTO in (embedding, head):
        name = "embedding" if embedding is RowPlacement.AUTO else "head"
        raise ConfigError(f"{name}: expected gathered or partitioned, got auto")
    if target.exists():
        raise StoreExistsError(f"{target}: there is something here already")
    process = resident_bytes()
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(open_stored(source, model))
        layout, moments = layout or old.layout, moments or old.expert_schema.moments
        blocks = _new_blocks(old, layout, stage_blocks)
        conditions = _conditions(old, layout, embedding, head)
        if old.expert_schema.frozen and moments is not MomentFormat.FP32:
            raise ConfigError(
                f"moments: the experts of {source} are frozen and have none, got {moments.value}"
            )
        partial = building_directory(target)
        _clear_debris(partial)
        partial.mkdir(parents=True)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        stack.enter_context(building(partial))
        cut = old.cut_as(layout, blocks, conditions)
        # A store locks its directory, and so does ``building``: a single rank's store cannot be made in ``partial`` itself.
        made = partial if layout.world > 1 else partial / "rank-0000"
        writer = _Writer(old, cut, conditions, moments, made, progress)
        account = writer.account(process)
        announced(account)
        written = writer.run()
        _copy_model(source, made)
        for path in (made, *rank_directories(made)):
            fsync_directory(path)
        made.rename(target)
        fsync_directory(target.absolute().parent)
    return Resharded(old.layout, layout, old.state.position, *written, moments, account)


def _new_blocks(old: StoredModel, layout: Layout, given: Sequence[int]) -> list[range]:
    """The blocks of each stage of ``layout``. Raises ConfigError if the model cannot be divided in this way."""
    if layout.tensor > 1 and isinstance(old.model, BuiltInSpec):
        check_divisible(old.model.config, layout.tensor)
    if layout.stages == 1:
        return [range(old.model.architecture.blocks)]
    old.model.check_stages()
    if layout.stages == old.layout.stages and not given:
        return old.blocks
    return stage_blocks(old.model.architecture, layout.stages, given)


def _conditions(
    old: StoredModel, layout: Layout, embedding: RowPlacement | None, head: RowPlacement | None
) -> dict[str, object]:
    """The layout conditions that all new ranks record. Raises ConfigError."""
    old_embedding, old_head = recorded_placements(old.conditions)
    embedding, head = embedding or old_embedding, head or old_head
    if isinstance(old.model, BuiltInSpec) and old.model.config.tie_embeddings is TieEmbeddings.TIED:
        head = embedding
    if layout.data == 1:  # a single rank owns all rows
        embedding = head = RowPlacement.GATHERED
    if RowPlacement.PARTITIONED in (embedding, head) and not isinstance(old.model, BuiltInSpec):
        raise ConfigError("embedding, head: expected gathered: an imported model's stay whole")
    return {
        **layout.as_json(),
        "embedding": embedding.value,
        "head": head.value,
    }


def _clear_debris(partial: Path) -> None:
    """Removes the leftovers of an earlier attempt. Raises StoreExistsError for anything else of that name."""
    if not partial.exists():
        return
    children = list(partial.iterdir()) if partial.is_dir() else [partial]
    own = OWN_NAMES | {IDENTITY}
    foreign = [path for path in children if path.name not in own and not path.match("rank-[0-9]*")]
    if foreign or not partial.is_dir():
        raise StoreExistsError(
            f"{partial}: needed to build the new store, but it holds files that do not belong to a store"
        )
    with building(partial):
        shutil.rmtree(partial)


class _Writer:
    """Writes the stores of the new ranks, one after another."""

    def __init__(
        self,
        old: StoredModel,
        cut: DenseCut,
        conditions: Mapping[str, object],
        moments: MomentFormat,
        target: Path,
        progress: OnProgress,
    ) -> None:
        self._old = old
        self._expert_schema = replace(old.expert_schema, moments=moments)
        self._layout = layout = cut.layout
        self._cut = cut
        self._parallel = conditions
        self._target = target
        self._progress = progress
        self._done = 0
        self._nbytes = 0
        experts = len(old.model.moe_layers) * old.model.experts * layout.replicas
        groups = (number for rank in range(layout.world) for number in cut.groups_of(rank))
        self._total = experts * self._expert_schema.nbytes + sum(self._group_schema(n).nbytes for n in groups)

    def account(self, process: int) -> MemoryAccount:
        """What the process will hold. ``process``: bytes that it held before the old stores were open."""
        old, new = self._old, self._expert_schema
        groups = {number for rank in range(self._layout.world) for number in self._cut.groups_of(rank)}
        whole = max(
            (
                old.group_schema(number).nbytes * len(old.cut.holders(number))
                + self._group_schema(number).nbytes
                for number in groups
            ),
            default=0,
        )
        each = old.expert_schema.nbytes
        experts = len(old.model.moe_layers) * old.model.experts
        caches = sum(store.core.arena.nbytes for store in old.stores)
        return MemoryAccount(
            {
                "process": process,
                "host caches": caches + 2 * minimum_host_budget([new]),
                "reads ahead": ahead_bytes(experts * each, each),
                "experts, converted": 0 if new == old.expert_schema else new.nbytes,
                "dense parameters": whole,
                "working memory": working_bytes(0),
            }
        )

    def run(self) -> tuple[int, int]:
        self._progress(0, self._total)
        for rank in range(self._layout.world):
            self._write_rank(rank)
        return self._done, self._nbytes

    def _write_rank(self, rank: int) -> None:
        old, model, layout = self._old, self._old.model, self._layout
        groups = self._cut.groups_of(rank)
        blocks = self._cut.blocks[coordinates_of(layout, rank)[0]]
        layers = [layer for layer in model.moe_layers if layer in blocks]
        directory = rank_directory(self._target, rank, layout.world)
        schemas = [self._expert_schema]
        for number in groups:
            if (schema := self._group_schema(number)) not in schemas:
                schemas.append(schema)
        first = old.stores[0]
        config = StoreConfig(host_budget=2 * minimum_host_budget(schemas), layers=tuple(layers))
        with ParameterStore.create(directory, schemas, config, adamw=first.core.adamw) as store:
            store.core.history.unpack(first.core.history.pack())
            for number in groups:
                store.register(self._cut.record(number).key, self._group_schema(number).name)
            owned = ExpertBlocks(model.experts, layout.expert).owned(rank % layout.expert)
            for layer in layers:
                for key, held, step in old.experts([expert_key(layer, expert) for expert in owned]):
                    sections = convert_moments(old.expert_schema, held, self._expert_schema.moments)
                    new = NewRecord(key, EXPERT_SCHEMA, layer, sections=partial(list, sections), step=step)
                    store.register_many([new])
                    self._wrote(sections)
            for number in groups:
                self._write_group(store, number, rank)
            own = {"rank": rank, **({"layers": [blocks.start, blocks.stop]} if layout.stages > 1 else {})}
            conditions = {**old.state.conditions, "parallel": {**self._parallel, **own}}
            state = replace(old.state, conditions=conditions)
            store.commit({**old.small_state(), STATE_KEY: state.pack()})

    def _write_group(self, store: ParameterStore, number: int, rank: int) -> None:
        """Writes a rank's record of dense parameters, and waits for the write, so that its memory can be reused."""
        schema = self._group_schema(number)
        groups = {group: scratch_buffers(schema.layout(group)) for group in schema.groups}
        buffers = [buffer for group in schema.groups for buffer in groups[group]]
        for buffer, whole in zip(buffers, self._old.group(number), strict=True):
            tensor_of(buffer, torch.float32).copy_(self._cut.part(number, whole, rank))
        core = store.core
        core.wait(core.write_through(self._cut.record(number).key, groups, step=core.history.applied))
        self._wrote([buffer.array() for buffer in buffers])

    def _group_schema(self, number: int) -> RecordSchema:
        """The schema of the old record, for slices of another size."""
        old, size = self._old.group_schema(number), self._cut.record(number).slice_numel
        return replace(old, name=f"{old.name.rpartition('-')[0]}-{size}", numel=size)

    def _wrote(self, sections: Sequence[npt.NDArray[np.generic]]) -> None:
        self._done += 1
        self._nbytes += sum(section.nbytes for section in sections)
        self._progress(self._nbytes, self._total)


def _copy_model(source: Path, target: Path) -> None:
    """Copies and fsyncs the files of an imported model, if ``source`` has them."""
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
