"""Opens and creates stores: builds the parts in order, and closes them in reverse order."""

from __future__ import annotations

import contextlib
import errno
import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tierstore import _native
from tierstore._native import Arena, DirectIo, Engine, HugePages, IoBackend, MapSync, Residency, StepClock
from tierstore.cache.config import CacheConfig, Scope
from tierstore.cache.frames import choose_frame_bytes_beside, frames_of
from tierstore.cache.host_cache import HostCache
from tierstore.errors import (
    BudgetError,
    ConfigError,
    StoreError,
    StoreFormatError,
    StoreInUseError,
)
from tierstore.links import open_link
from tierstore.machine import cores
from tierstore.stats import OnProgress, no_progress
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import IoConfig, StoreAccess, StoreConfig, TransferTuning, tune
from tierstore.store.disk.drives import Drives
from tierstore.store.disk.home import (
    IDENTITY,
    Home,
    make_directories,
    read_identity,
    refuse_foreign,
    remove_content,
    unfinished_creation,
)
from tierstore.store.disk.lease import DirectoryLease
from tierstore.store.disk.store_extents import StoreExtents
from tierstore.store.disk.write_budget import WriteBudget
from tierstore.store.format import (
    Group,
    Placement,
    RecordSchema,
    Section,
    format_version,
)
from tierstore.store.index.database import PREVIOUS, Commit, Index
from tierstore.store.index.live import LiveIndex
from tierstore.store.optimizer import CaughtUpRecords, replay_scratch_bytes, replays
from tierstore.store.reading import OpenAt, missed_records, read_meta
from tierstore.trace.files import TraceRecorder
from tierstore.trace.replay import quotas_by_layer

#: Of the cache, one of which a pass takes at a time if it changes records. Ten: a step of 139 M parameters, half of whose
#: records fit, moves 1.11 GiB each way by ``plan``, with five 1.13, with twenty 1.11, with a layer at a time 1.50 and 1.48.
_PARTS = 10


@dataclass
class Parts:
    """The parts of an open store, in the order of their construction."""

    home: Home
    drives: Drives
    config: StoreConfig
    access: StoreAccess
    adamw: AdamWConfig
    engine: Engine
    arena: Arena
    index: Index
    extents: StoreExtents
    live: LiveIndex
    cache: HostCache
    recording: TraceRecorder | None
    tuning: TransferTuning
    #: Closes the parts in reverse order, but the engine first: once it has stopped, nothing moves any more.
    resources: contextlib.ExitStack
    #: Only in a store opened to read.
    caught_up: CaughtUpRecords | None = None
    #: The last commit, if it has been read already; ``Committer.load`` takes it.
    commit: Commit | None = None

    def meta(self) -> dict[str, object]:
        """The index's entry for the store itself."""
        return {
            "format": format_version(self.extents.schemas),
            "uuid": self.home.uuid,
            "schemas": [schema.as_json() for schema in self.extents.schemas],
            "inactive": self.adamw.inactive.value,
            **({"stripe": self.drives.as_json()} if len(self.drives) > 1 else {}),
        }


def create(
    directory: Path,
    schemas: Sequence[RecordSchema],
    config: StoreConfig,
    adamw: AdamWConfig,
    trace: Path | None,
    io_log: Path | None,
    populating: OnProgress,
) -> Parts:
    """Makes a store's directory without an identity, which the first commit adds. On failure nothing is left."""
    refuse_foreign(directory)
    names = [schema.name for schema in schemas]
    if not names or len(set(names)) != len(names):
        raise ConfigError(
            f"{directory}: a store needs record schemas, each with a name of its own, got {names}"
        )
    check_budget(config, schemas, config.layers)
    with contextlib.ExitStack() as stack:
        home = Home(directory, str(uuid.uuid4()), make_directories(directory))
        stack.callback(home.remove_made)
        try:
            home.lease = lease = stack.enter_context(DirectoryLease(directory))
        except StoreInUseError:
            home.made = ()  # it belongs to the lease's holder, even while it is empty
            raise
        refuse_foreign(directory)  # another process may have claimed it meanwhile
        home.sync_names()
        abandoned = unfinished_creation(directory)
        if not abandoned:
            stack.callback(home.remove_unpublished)
        drives = Drives.create(home, config.stripe, abandoned)
        if abandoned:  # the record of the abandoned store's directories stays until they are taken over
            stack.callback(home.remove_unpublished)
        stack.callback(drives.close)
        remove_content(directory)
        index = Index.create(directory / "index")
        stack.callback(index.close)
        lease.watch("index/data.mdb", index.fileno())
        return _assemble(stack, drives, schemas, config, adamw, index, trace, io_log, populating)


def open_existing(
    directory: Path,
    config: StoreConfig,
    adamw: AdamWConfig | None,
    at: OpenAt,
    trace: Path | None,
    io_log: Path | None,
    populating: OnProgress,
    further: Sequence[RecordSchema] = (),
    access: StoreAccess = StoreAccess.WRITE,
) -> Parts:
    """As ``ParameterStore.open``."""
    if access is StoreAccess.READ and further:
        raise StoreError(f"{directory}: a store opened to read cannot get new schemas")
    home = Home(directory, read_identity(directory), published=True)
    with contextlib.ExitStack() as stack:
        home.lease = lease = stack.enter_context(DirectoryLease(directory, access=access))
        lease.watch(IDENTITY)
        index = stack.enter_context(contextlib.closing(Index(directory / "index", access=access)))
        lease.watch("index/data.mdb", index.fileno())
        own, inactive, known = read_meta(home, index)
        schemas = [*own, *_added(directory, own, further)]
        if adamw is not None and adamw.inactive is not inactive:
            raise StoreFormatError(
                f"{directory}: made with inactive = {inactive.value}, not {adamw.inactive.value}"
            )
        name = PREVIOUS if at is OpenAt.PREVIOUS else None
        if name is not None and name not in index.snapshots():
            raise StoreError(f"{directory}: there is no prepared commit to go back from")
        if name is not None and access is StoreAccess.WRITE:
            index.roll_back(name)
        commit = index.read_commit(name) if access is StoreAccess.READ else None
        missed = [] if commit is None else [schemas[i] for i in missed_records(schemas, commit, inactive)]
        layers = config.layers or index.layers()
        check_budget(config, schemas, layers, access, missed)
        adamw = adamw or AdamWConfig(inactive=inactive)
        config = replace(config, layers=layers)
        drives = Drives.open(home, config.stripe, known, access)
        stack.callback(drives.close)
        added = [schema.name for schema in schemas[len(own) :]]
        parts = _assemble(
            stack, drives, schemas, config, adamw, index, trace, io_log, populating, added, access, missed
        )
        parts.commit = commit
        return parts


def _added(
    directory: Path, own: Sequence[RecordSchema], further: Sequence[RecordSchema]
) -> list[RecordSchema]:
    """The schemas of ``further`` that a store with the schemas ``own`` lacks. Raises StoreError if it has another one of
    the same name.
    """
    known = {schema.name: schema for schema in own}
    for schema in further:
        if known.get(schema.name, schema) != schema:
            raise StoreError(
                f"{directory}: it has a schema {schema.name!r} already: {known[schema.name]}, not {schema}"
            )
    return [schema for schema in further if schema.name not in known]


# Budgets ----------------------------------------------------------------------------------------------------


def _cached_sections(schemas: Sequence[RecordSchema], access: StoreAccess) -> list[list[Section]]:
    """Per cached schema, the sections of the groups that a store opened with ``access`` caches: for a reader, weights."""
    cached = [schema for schema in schemas if schema.placement is Placement.CACHED]
    groups = [Group.WEIGHTS] if access is StoreAccess.READ else list(Group)
    return [[s for group in groups for s in schema.layout(group).sections] for schema in cached]


def record_frame_bytes(schemas: Sequence[RecordSchema], access: StoreAccess = StoreAccess.WRITE) -> int:
    """The frame size of an arena for cached records of ``schemas``."""
    sections = [section for record in _cached_sections(schemas, access) for section in record]
    return choose_frame_bytes_beside(
        [section.nbytes for section in sections if not section.is_scale],
        [section.nbytes for section in sections if section.is_scale],
    )


def cache_frames(nbytes: int, schemas: Sequence[RecordSchema], access: StoreAccess) -> tuple[int, int]:
    """The number of frames of a host cache of ``nbytes`` for records of ``schemas``, and the bytes of each."""
    frame = record_frame_bytes(schemas, access)
    return max(nbytes // frame, 1), frame


def minimum_host_budget(
    schemas: Sequence[RecordSchema],
    cache: CacheConfig | None = None,
    layers: int = 1,
    access: StoreAccess = StoreAccess.WRITE,
) -> int:
    """The smallest host cache, in bytes, for one record of each schema: all its groups, or with ``StoreAccess.READ`` its
    weights. With quotas for ``layers`` layers, the smallest quota must hold that much.
    """
    sizes = [[section.nbytes for section in record] for record in _cached_sections(schemas, access)]
    frame = record_frame_bytes(schemas, access)
    frames = max((frames_of(sections, frame) for sections in sizes), default=1)
    if cache is not None:
        frames += cache.headroom_frames
        if cache.layer_shares:
            smallest = min(cache.layer_shares) / sum(cache.layer_shares)
            # Rounded shares still hold the original amount, as in quotas_by_layer.
            frames = math.ceil(frames / smallest * (1 - 1e-8))
        elif cache.scope is Scope.LAYER:
            frames *= max(layers, 1)
    return frames * frame


def resident_cache_bytes(schema: RecordSchema, records: int) -> int:
    """Bytes of a host cache for the weights and moments of ``records`` records of ``schema``, which then never leave it."""
    frame = record_frame_bytes([schema])
    sections = [s.nbytes for group in (Group.WEIGHTS, Group.MOMENTS) for s in schema.layout(group).sections]
    return records * frames_of(sections, frame) * frame


def minimum_reading_budget(schemas: Sequence[RecordSchema]) -> int:
    """The smallest host cache, in bytes, for opening a store of ``schemas`` to read, whatever steps were missed."""
    scratch = sum(replay_scratch_bytes(schema) for schema in schemas if replays(schema))
    return minimum_host_budget(schemas, access=StoreAccess.READ) + scratch


def check_budget(
    config: StoreConfig,
    schemas: Sequence[RecordSchema],
    layers: Sequence[int],
    access: StoreAccess = StoreAccess.WRITE,
    missed: Sequence[RecordSchema] = (),
) -> None:
    """Raises BudgetError naming the minimum, ConfigError for quotas of unknown layers."""
    by_layer = config.cache.scope is Scope.LAYER
    if by_layer and not layers:
        raise ConfigError(
            "cache.scope: expected global: a quota for each layer needs layers with experts (StoreConfig.layers), got none"
        )
    shares = len(config.cache.layer_shares)
    if shares and shares != len(set(layers)):
        raise ConfigError(
            f"cache.layer_shares: expected {len(set(layers))}, one for each layer, got {shares}"
        )
    minimum = minimum_host_budget(schemas, config.cache, len(layers), access)
    minimum += sum(replay_scratch_bytes(schema) for schema in missed)
    if config.host_budget < minimum:
        gradient = "" if access is StoreAccess.READ else " with its gradient"
        each = f" in each of {len(layers)} layers" if by_layer else ""
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes cannot hold one record{gradient}{each}; "
            f"the minimum is {minimum} bytes"
        )


# Building ---------------------------------------------------------------------------------------------------


def budgeted_arena(
    setting: str,
    budget: int,
    nbytes: int,
    huge_pages: HugePages,
    populating: OnProgress = no_progress,
) -> Arena:
    """An arena of ``nbytes`` bytes, as ``setting`` allows with ``budget``. ``populating`` gets the bytes that are there,
    and all. Raises BudgetError if there is no such memory, OSError.
    """
    try:
        arena = Arena(nbytes, huge_pages, lambda done: populating(done, nbytes))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise BudgetError(
            f"{setting}: expected what this machine can give, got {budget} bytes: {error.strerror}"
        ) from error
    populating(nbytes, nbytes)  # the last piece may be that of a thread which tells nothing
    return arena


def _assemble(
    stack: contextlib.ExitStack,
    drives: Drives,
    schemas: Sequence[RecordSchema],
    config: StoreConfig,
    adamw: AdamWConfig,
    index: Index,
    trace: Path | None,
    io_log: Path | None,
    populating: OnProgress,
    added: Sequence[str] = (),
    access: StoreAccess = StoreAccess.WRITE,
    missed: Sequence[RecordSchema] = (),
) -> Parts:
    """Builds the remaining parts; ``stack`` closes them if one fails, and otherwise becomes part of them."""
    tuning = tune(config.io, drives.home.directory)
    fds = [fd for drive in drives if drive.lease is not None for fd in drive.lease.fds]
    engine = make_engine(config.io, tuning, lease_fds=fds, log_path=io_log)
    stack.callback(engine.close)
    scratch = sum(replay_scratch_bytes(schema) for schema in missed)
    frames, frame = cache_frames(config.host_budget - scratch, schemas, access)
    huge_pages = HugePages[config.io.huge_pages.name]
    arena = budgeted_arena("host_budget", config.host_budget, frames * frame, huge_pages, populating)
    writes = config.wear.daily_write_budget if access is StoreAccess.WRITE else 0
    extents = StoreExtents(
        engine,
        drives,
        schemas,
        direct=DirectIo[config.io.direct.name],
        link=open_link(config.disk),
        budget=WriteBudget(engine, writes) if writes else None,
        discard=config.wear.discard,
        added=added,
        access=access,
    )
    stack.callback(extents.close)
    if access is StoreAccess.READ and config.clock is StepClock.LATE_ACCESSES:
        config = replace(config, clock=StepClock.ACCESSES)  # a reader takes no optimizer steps
    residency = make_residency(config, frames, frame)
    recording = None if trace is None else stack.enter_context(TraceRecorder(trace, residency))
    live = LiveIndex(extents)
    caught_up = CaughtUpRecords(engine, live, missed) if access is StoreAccess.READ else None
    cache = HostCache(
        engine=engine,
        arena=arena,
        frame_bytes=frame,
        residency=residency,
        find_backing=live.backing if caught_up is None else caught_up.backing,
    )
    if caught_up is not None:
        stack.callback(caught_up.end)
    stack.callback(engine.close)
    stack.callback(extents.end_discards)
    return Parts(
        home=drives.home,
        drives=drives,
        config=config,
        access=access,
        adamw=adamw,
        engine=engine,
        arena=arena,
        index=index,
        extents=extents,
        live=live,
        cache=cache,
        recording=recording,
        tuning=tuning,
        resources=stack.pop_all(),
        caught_up=caught_up,
    )


def make_residency(config: StoreConfig, frames: int, frame_bytes: int) -> Residency:
    """The residency core of ``config``."""
    settings: dict[str, Any] = {
        "policy": config.cache.policy,
        "policy_options": dict(config.cache.options),
        "scope": _native.Scope[config.cache.scope.name],
        "lookahead_frames": min(config.lookahead // frame_bytes, frames),
        "group_order": config.group_order,
        "clock": config.clock,
        "parts": _PARTS,
    }
    if config.cache.scope is Scope.LAYER:
        settings["layer_quotas"] = quotas_by_layer(config.layers, frames, config.cache.layer_shares)
    return Residency(frames, **settings)


def make_engine(
    io: IoConfig, tuning: TransferTuning, *, lease_fds: Sequence[int] = (), log_path: Path | None = None
) -> Engine:
    """An engine with the settings ``io`` and ``tuning``. Raises OSError if a backend that is ON is refused."""
    return Engine(
        backend=IoBackend[io.backend.name],
        io_threads=io.threads,
        queue_depth=tuning.queue_depth,
        chunk_bytes=tuning.chunk_bytes,
        compute_threads=io.compute_threads or min(cores(), 4),
        lease_fds=lease_fds,
        map_sync=MapSync[io.map_sync.name],
        log_path=None if log_path is None else str(log_path),
    )
