"""``tierstore import``: makes a store of a transformers checkpoint.

Names, shapes, types and space are checked before the first write. Then the records are written a part at a time, each
part a commit, so that a killed import resumes where it stopped and skips the records that are committed. Until the last
commit the store is marked partial, and training refuses it.

With several ranks each imports its own experts and its own slices of the dense units, side by side.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tierstore.dense.layout import UnitLayout
from tierstore.dense.slices import dense_schemas, schema_name
from tierstore.errors import (
    ConfigError,
    DataError,
    StoreError,
    StoreExistsError,
    StoreFormatError,
    TierstoreError,
)
from tierstore.hf.checkpoint import Checkpoint, TensorInfo, TensorReader
from tierstore.hf.describing import CONFIG_NAME, describe_config, model_class, parse_config, read_config
from tierstore.hf.families import FAMILIES, Part
from tierstore.hf.filling import ExpertJob, Filler, Job, UnitJob, held_bytes
from tierstore.hf.manifest import CarriedEntry, ImportProgress, ImportState, Manifest, Weights
from tierstore.hf.matching import (
    carried_files,
    check_tokenizer,
    companion_files,
    companion_notes,
    copy_carried,
    copy_companions,
    match,
)
from tierstore.hf.spec import hf_spec
from tierstore.hf.weights import WeightReader
from tierstore.machine import MemoryAccount, resident_bytes, working_bytes
from tierstore.model.config import ComputeDtype
from tierstore.model.store_schema import (
    BUFFERS_KEY,
    EXPERT_SCHEMA,
    IMPORT_KEY,
    STATE_KEY,
    TrainState,
    expert_key,
    expert_record,
    pack_arrays,
    quantized_layout,
)
from tierstore.parallel import Mesh, RankEnvironment
from tierstore.quant.layout import CodeFormat
from tierstore.stats import OnProgress, no_progress
from tierstore.store.config import StoreConfig
from tierstore.store.disk.home import (
    IDENTITY,
    MODEL_DIRECTORY,
    fsync_directory,
    rank_directories,
    rank_directory,
    refuse_foreign,
    remove_unfinished,
)
from tierstore.store.disk.store_extents import extent_bytes
from tierstore.store.format import MomentFormat, RecordSchema, Training
from tierstore.store.opening import minimum_host_budget
from tierstore.store.parameter_store import ParameterStore
from tierstore.store.reading import OpenAt, read_states
from tierstore.store.registering import RecordLoader


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """How a checkpoint is imported.

    ``compute`` None: fp32 for a checkpoint in fp32, else bf16. ``moments``: the format of trained experts' moments.
    ``codes``: the format of frozen experts' weights; None: the compute type. ``host_budget`` (bytes) limits the memory
    for experts being imported, which holds at least two. ``memory`` (bytes; 0: not given) limits all of the process, and
    ``host_budget`` to what it leaves. A commit follows every ``commit_bytes`` of the source.
    """

    compute: ComputeDtype | None = None
    weights: Weights = Weights.TRAINABLE
    moments: MomentFormat = MomentFormat.FP32
    codes: CodeFormat | None = None
    host_budget: int = 64 << 20
    memory: int = 0
    commit_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.weights is Weights.FROZEN and self.moments is not MomentFormat.FP32:
            raise ConfigError(
                "moments: frozen experts have none; the moments of LoRA pairs are chosen when the pairs are trained "
                "(adamw.moments)"
            )
        if self.codes is not None and self.weights is not Weights.FROZEN:
            raise ConfigError(
                f"codes: weights in {self.codes.value} cannot be trained; only frozen experts may have them"
            )


@dataclass(frozen=True, kw_only=True)
class ImportPlan:
    """What an import will do on one rank, determined without writing anything. ``carried``: tensors that the family ignores;
    ``notes``: one line for each ignored part of the model directory.
    """

    manifest: Manifest
    #: The state of its commits until the last.
    state: ImportState
    checkpoint: Checkpoint
    carried: tuple[TensorInfo, ...]
    tensor_ranks: int
    schemas: tuple[RecordSchema, ...]
    jobs: tuple[Job, ...]
    counts: dict[str, int]
    notes: tuple[str, ...]

    @property
    def disk_bytes(self) -> int:
        """Space that the store reserves for its records; copy on write needs two copies of trained records."""
        return sum(extent_bytes(schema, self.counts[schema.name], 0) for schema in self.schemas)

    def account(self, host_budget: int, process: int) -> MemoryAccount:
        """What the process will hold, with ``host_budget`` bytes for experts. ``process``: bytes that it holds already."""
        parts = held_bytes(self.schemas[0], self.jobs, host_budget)
        cache = minimum_host_budget(list(self.schemas))
        return MemoryAccount(
            {"process": process, **parts, "host cache": cache, "working memory": working_bytes(0)}
        )

    def budget_within(self, options: ImportOptions, process: int) -> int:
        """The memory for experts that ``options`` leave. Raises BudgetError if ``memory`` is too small for two experts."""
        if not options.memory:
            return options.host_budget
        least = self.account(0, process)
        least.check(options.memory)
        return min(options.host_budget, options.memory - least.nbytes + least.parts["experts"])

    @property
    def source_bytes(self) -> int:
        """Bytes of the checkpoint that the jobs read."""
        return sum(job.nbytes for job in self.jobs)


@dataclass(kw_only=True)
class ImportReport:
    """What an import did on this rank. ``records`` were added by this call, ``skipped`` by an earlier one.

    ``moving_s`` is the part of ``elapsed_s`` from the first write to the last commit; the rest is reading headers and
    transformers' own start. ``account``: what the process was to hold. ``direct_reason``: why the checkpoint was read
    through the page cache; empty if it was not.
    """

    manifest: Manifest
    skipped: int
    reserved_bytes: int
    account: MemoryAccount
    records: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    commits: int = 0
    moving_s: float = 0.0
    elapsed_s: float = 0.0
    direct_reason: str = ""


def import_model(
    source: Path,
    store: Path,
    options: ImportOptions | None = None,
    *,
    mesh: Mesh | None = None,
    planned: Callable[[ImportPlan, MemoryAccount], None] = lambda plan, account: None,
    progress: OnProgress = no_progress,
) -> ImportReport:
    """Imports the model directory ``source`` into ``store``, or resumes an interrupted import of the same directory.

    On several ranks (``mesh``) a collective. ``planned`` is called before the first write, with what the process will hold;
    ``progress`` receives the bytes of the checkpoint that this rank has read, in all runs, and those that it reads in all.
    Raises DataError and ConfigError for a checkpoint that does not match its configuration, StoreExistsError,
    StoreFormatError for another source, BudgetError for too little ``memory``, OSError (ENOSPC) before anything is written.
    """
    options = options or ImportOptions()
    start = time.monotonic()
    mesh = mesh or Mesh.alone(RankEnvironment(), torch.device("cpu"))
    plan = plan_import(source, options, mesh)
    _check_ranks(plan.state, mesh)
    _check_stores(store, plan.state, mesh)
    process = resident_bytes()
    options = replace(options, host_budget=plan.budget_within(options, process))
    account = plan.account(options.host_budget, process)
    planned(plan, account)
    with _open_store(store, plan, mesh) as opened, TensorReader() as reader:
        job = _Import(opened, plan, options, account, progress)
        job.begin()
        if mesh.world.rank == 0:
            if not opened.keys:  # files that another import left beside the ranks' stores
                shutil.rmtree(store / MODEL_DIRECTORY, ignore_errors=True)
            _write_model_files(store, source, plan, reader)
        weights = WeightReader(plan.checkpoint.tensors, reader)
        job.run(weights)
        mesh.world.barrier()  # the files exist before any rank's import is marked complete
        job.complete(_read_buffers(plan.manifest, weights))
        job.report.direct_reason = reader.direct_reason
    job.report.elapsed_s = time.monotonic() - start
    return job.report


# Planning ---------------------------------------------------------------------------------------------------


def plan_import(source: Path, options: ImportOptions, mesh: Mesh) -> ImportPlan:
    """Reads the configuration and all headers, compares them, and divides the work. Raises as ``import_model``."""
    if mesh.stages > 1:
        raise ConfigError(
            "parallel.stages: expected 1: an import makes no pipeline stages; tierstore reshard makes a store for stages "
            "of it"
        )
    config = read_config(source)
    checkpoint = Checkpoint.open(source)
    compute = options.compute or _compute_of(checkpoint)
    described = describe_config(config, compute, where=str(source / "config.json"))
    matched, carried = match(described, checkpoint)
    manifest = replace(
        matched,
        weights=options.weights,
        codes=options.codes,
        files=tuple(companion_files(source)),
        carried=tuple(
            CarriedEntry(info.name, name) for name, held in carried_files(carried) for info in held
        ),
        source=source.name or str(source.resolve().name),
        fingerprint=checkpoint.fingerprint(),
    )
    check_tokenizer(source, manifest.vocab_size)
    _check_tied(manifest, checkpoint.tensors)
    # Tensor-parallel ranks divide only the experts of an imported model, nothing else.
    layouts = manifest.unit_layouts(mesh.data.size)
    owned = mesh.blocks(manifest.experts.count).owned(mesh.expert.rank)
    jobs = tuple(_jobs(manifest, checkpoint.tensors, layouts, mesh.data.rank, owned))
    training = Training.FROZEN if manifest.weights is Weights.FROZEN else Training.TRAINED
    quantized = None if manifest.codes is None else quantized_layout(hf_spec(manifest, config))
    expert = expert_record(
        manifest.experts.numel, manifest.compute, training, options.moments, quantized=quantized
    )
    schemas = [expert, *dense_schemas(layouts, expert.training)]
    counts = {schema.name: 0 for schema in schemas}
    counts[EXPERT_SCHEMA] = len(owned) * len(manifest.experts.layers)
    for layout in layouts:
        counts[schema_name(layout, expert.training)] += 1
    return ImportPlan(
        manifest=manifest,
        state=ImportState(
            progress=ImportProgress.PARTIAL,
            fingerprint=manifest.fingerprint,
            compute=manifest.compute,
            weights=manifest.weights,
            ranks=mesh.world.size,
            expert_ranks=mesh.expert.size,
            rank=mesh.world.rank,
            moments=expert.moments,
            codes=manifest.codes,
        ),
        checkpoint=checkpoint,
        carried=carried,
        tensor_ranks=mesh.tensor.size,
        schemas=tuple(schemas),
        jobs=jobs,
        counts=counts,
        notes=tuple(_notes(source, config)),
    )


def _notes(source: Path, config: Mapping[str, Any]) -> Iterator[str]:
    _, asked = model_class(parse_config(config))
    if asked is not None:
        yield f"{source / CONFIG_NAME}: _attn_implementation = {asked!r} is ignored: it is not available here"
    yield from companion_notes(source)


def _compute_of(checkpoint: Checkpoint) -> ComputeDtype:
    """fp32 where most of the checkpoint is fp32."""
    wide = sum(info.nbytes for info in checkpoint.tensors.values() if info.dtype == "F32")
    whole = sum(info.nbytes for info in checkpoint.tensors.values())
    return ComputeDtype.FP32 if 2 * wide > whole else ComputeDtype.BF16


def _jobs(
    manifest: Manifest,
    tensors: Mapping[str, TensorInfo],
    layouts: list[UnitLayout],
    rank: int,
    owned: range,
) -> Iterator[Job]:
    """The dense units in order, each block followed by its experts: the order in which training reads them."""
    family, experts = FAMILIES[manifest.model_type], manifest.experts
    for layout, unit in zip(layouts, manifest.units, strict=True):
        whole = sum(tensors[entry.source].nbytes for entry in unit.parameters)
        nbytes = whole * layout.slice_numel // max(layout.padded_numel, 1)
        yield UnitJob(layout, unit.parameters, rank, nbytes)
        prefix, _, number = unit.name.partition(".")
        if prefix == "block" and int(number) in experts.layers:
            layer = int(number)
            for expert in owned:
                parts = family.expert_parts(layer, expert, experts)
                nbytes = sum(_part_bytes(tensors, part) for part in parts)
                yield ExpertJob(expert_key(layer, expert), layer, parts, nbytes)


def _part_bytes(tensors: Mapping[str, TensorInfo], part: Part) -> int:
    info = tensors.get(part.source)
    if info is not None:
        return part.numel * info.item_bytes
    return part.numel // 2 + part.numel // 32  # MXFP4: codes and scales


def _check_tied(manifest: Manifest, tensors: Mapping[str, TensorInfo]) -> None:
    """Raises DataError if a tied tensor is stored under both names with different values."""
    sources = {entry.name: entry.source for entry in manifest.parameters()}
    with TensorReader() as reader, TensorReader() as beside:
        for alias in manifest.tied:
            if not alias.stored:
                continue
            one, other = tensors[sources[alias.of]], tensors[alias.source]
            chunks = zip(reader.chunks(one), beside.chunks(other), strict=False)
            same = one.dtype == other.dtype and all(np.array_equal(*pair) for pair in chunks)
            if not same:
                raise DataError(
                    f"{other.file}: tensor {alias.source!r} differs from {one.name!r}, but the configuration ties them "
                    "(tie_word_embeddings)"
                )


# The store --------------------------------------------------------------------------------------------------


def _check_ranks(state: ImportState, mesh: Mesh) -> None:
    """Raises StoreError on all ranks unless all have the same checkpoint and options."""
    found = mesh.world.all_gather_object(replace(state, rank=0))
    for rank, other in enumerate(found):
        if other != found[0]:
            raise StoreError(f"rank {rank} imports another checkpoint, or with other options, than rank 0")


def _check_stores(store: Path, state: ImportState, mesh: Mesh) -> None:
    """Raises StoreExistsError, StoreInUseError or StoreFormatError on all ranks unless each can begin a store, or continue
    its own; a collective.
    """
    problem: TierstoreError | None = None
    try:
        _check_target(store, mesh.world.size)
        directory = rank_directory(store, mesh.world.rank, mesh.world.size)
        if (directory / IDENTITY).exists():
            _check_same(directory, state)
        else:
            refuse_foreign(directory)
    except TierstoreError as error:
        problem = error
    for other in mesh.world.all_gather_object(problem):
        if other is not None:
            raise type(other)(str(other)) from None


def _check_target(store: Path, ranks: int) -> None:
    """Raises StoreFormatError for a store of another number of ranks."""
    several = len(rank_directories(store))
    if several > ranks or (ranks == 1 and several) or (ranks > 1 and (store / IDENTITY).exists()):
        raise StoreFormatError(f"{store}: holds a store of {several or 1} ranks, but this import has {ranks}")


@contextlib.contextmanager
def _open_store(store: Path, plan: ImportPlan, mesh: Mesh) -> Iterator[ParameterStore]:
    """The rank's store: a new one, or the one that the same import began."""
    directory = rank_directory(store, mesh.world.rank, mesh.world.size)
    schemas = list(plan.schemas)
    config = StoreConfig(host_budget=minimum_host_budget(schemas), layers=plan.manifest.experts.layers)
    fresh = not (directory / IDENTITY).exists()
    opened = (
        ParameterStore.create(directory, schemas, config) if fresh else ParameterStore.open(directory, config)
    )
    try:
        with opened:
            yield opened
    except DataError:
        if fresh:  # a checkpoint that is refused leaves no store
            _remove(directory)
            if mesh.world.size > 1 and mesh.world.rank == 0:
                shutil.rmtree(store / MODEL_DIRECTORY, ignore_errors=True)
        raise


def _remove(directory: Path) -> None:
    """Removes a store, its identity first: after a crash the rest is no longer taken for a store."""
    (directory / IDENTITY).unlink(missing_ok=True)
    fsync_directory(directory)
    remove_unfinished(directory)
    with contextlib.suppress(OSError):  # it existed before, or holds other files
        directory.rmdir()


def imported_state(directory: Path) -> ImportState | None:
    """What the last commit of the store in ``directory`` says of its import; None if it is no import's. Raises
    StoreFormatError.
    """
    packed = read_states(directory, IMPORT_KEY).get(OpenAt.LAST)
    return None if packed is None else ImportState.unpack(packed, where=str(directory))


def _check_same(directory: Path, state: ImportState) -> None:
    """Raises StoreExistsError, StoreFormatError unless this import made the store and no step has trained it."""
    found = imported_state(directory)
    if found is None:
        raise StoreExistsError(f"{directory}: a store that no import made exists here already")
    trained = read_states(directory, STATE_KEY).get(OpenAt.LAST)
    if trained is not None and TrainState.unpack({STATE_KEY: trained}, where=str(directory)).begun:
        raise StoreExistsError(
            f"{directory}: holds an imported model that has been trained since; give another --store"
        )
    if found.fingerprint != state.fingerprint:
        raise StoreFormatError(f"{directory}: holds the import of another checkpoint; give another --store")
    if replace(found, progress=state.progress) != state:
        raise StoreFormatError(
            f"{directory}: holds an import of this checkpoint with other options: {_options(found)}; now "
            f"{_options(state)}"
        )


def _options(state: ImportState) -> str:
    codes = "" if state.codes is None else f" as {state.codes.value}"
    return (
        f"compute {state.compute.value}, {state.weights.value}{codes}, moments {state.moments.value}, rank {state.rank} of "
        f"{state.ranks} in groups of {state.expert_ranks}"
    )


class _Import:
    """One rank's import into an open store."""

    def __init__(
        self,
        store: ParameterStore,
        plan: ImportPlan,
        options: ImportOptions,
        account: MemoryAccount,
        progress: OnProgress,
    ) -> None:
        self._core = store.core
        self._plan, self._state, self._options, self._progress = plan, plan.state, options, progress
        self._jobs = [job for job in plan.jobs if job.key not in store.core.records]
        self.report = ImportReport(
            manifest=plan.manifest,
            skipped=len(plan.jobs) - len(self._jobs),
            reserved_bytes=plan.disk_bytes,
            account=account,
        )
        self._total, self._left = plan.source_bytes, sum(job.nbytes for job in self._jobs)
        self._uncommitted = 0
        self._loader: RecordLoader | None = None
        said = store.last_commit.state.get(IMPORT_KEY)
        self._complete = (
            said is not None and ImportState.unpack(said, where="").progress is ImportProgress.COMPLETE
        )

    def begin(self) -> None:
        """Reserves the space and commits the partial import's description. Raises OSError (ENOSPC)."""
        self._began_s = time.monotonic()
        if not self._complete:
            self._loader = RecordLoader(self._core)
            self._core.reserve(self._plan.counts)
            self._commit()

    def run(self, weights: WeightReader) -> None:
        """Writes the records that are missing."""
        if self._loader is None:
            return
        self._progress(self._total - self._left, self._total)
        expert, budget = self._plan.schemas[0], self._options.host_budget
        with Filler(self._loader, weights, expert, budget=budget, wrote=self._wrote) as filler:
            filler.run(self._jobs)

    def complete(self, buffers: bytes) -> None:
        """The last commit: from here on the store can be trained."""
        if not self._complete:
            state = TrainState(
                begun=False,
                conditions={
                    "parallel": {
                        "ranks": self._state.ranks,
                        "expert_ranks": self._state.expert_ranks,
                        "tensor_ranks": self._plan.tensor_ranks,
                        "rank": self._state.rank,
                    },
                    "dense": {"fusion": self._plan.manifest.fusion.value},
                },
            )
            self._state = replace(self._state, progress=ImportProgress.COMPLETE)
            self._commit({STATE_KEY: state.pack(), BUFFERS_KEY: buffers})
        drives = self._core.extents.drive_reports()
        self.report.written_bytes = sum(drive.written_bytes for drive in drives)

    def _wrote(self, job: Job) -> None:
        self.report.read_bytes += job.nbytes
        self.report.records += 1
        self._left -= job.nbytes
        self._uncommitted += job.nbytes
        if self._uncommitted >= self._options.commit_bytes:
            self._commit()
        self._progress(self._total - self._left, self._total)

    def _commit(self, more: dict[str, bytes] | None = None) -> None:
        self._core.committer.commit({IMPORT_KEY: self._state.pack(), **(more or {})})
        self._uncommitted = 0
        self.report.commits += 1
        self.report.moving_s = time.monotonic() - self._began_s


# Beside the records -----------------------------------------------------------------------------------------


def _write_model_files(store: Path, source: Path, plan: ImportPlan, reader: TensorReader) -> None:
    directory = store / MODEL_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    fsync_directory(store)
    copy_companions(source, directory, plan.manifest.files, plan.manifest.quantization)
    copy_carried(plan.carried, directory, reader)
    plan.manifest.write(directory)
    fsync_directory(directory)


def _read_buffers(manifest: Manifest, weights: WeightReader) -> bytes:
    """The model's buffers, fp32, packed for the state of a commit. Raises DataError for NaN."""
    arrays = {}
    for entry in manifest.buffers:
        values = np.empty(entry.numel, np.float32)
        weights.read_fp32(Part.whole(entry), 0, entry.numel, values)
        arrays[entry.name] = values.reshape(entry.shape)
    return pack_arrays(arrays)
