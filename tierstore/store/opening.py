"""Opening and creating a store: its parts are built in order, and torn down in the reverse order."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tierstore import _native
from tierstore._native import Arena, Buffer, DirectIo, Engine, HugePages, IoBackend
from tierstore.cache.config import PolicyName, Scope
from tierstore.cache.frames import choose_frame_bytes, frames_of
from tierstore.cache.host_cache import HostCache, Residency
from tierstore.errors import BudgetError, ChecksumError, StoreFormatError, StoreMissingError
from tierstore.lab.recording import RecordingResidency
from tierstore.store.adamw import AdamWConfig
from tierstore.store.config import Capability, IoBackendName, IoConfig, StoreConfig
from tierstore.store.format import (
    COMMITTED_GROUPS,
    FORMAT_VERSION,
    Group,
    GroupLayout,
    Placement,
    RecordSchema,
)
from tierstore.store.index import Index
from tierstore.store.lease import Lease
from tierstore.store.slots import SlotMap

__all__ = ["IDENTITY", "Parts", "Translation", "create", "minimum_host_budget", "open_existing", "scratch_buffers"]

IDENTITY = "tierstore.json"
_OWN_NAMES = {"lease", "index", "extents", "scratch", f"{IDENTITY}.new"}
_BACKENDS = {
    IoBackendName.AUTO: IoBackend.AUTO,
    IoBackendName.URING: IoBackend.URING,
    IoBackendName.THREADS: IoBackend.THREADS,
}
_DIRECT = {Capability.OFF: DirectIo.OFF, Capability.AUTO: DirectIo.AUTO, Capability.ON: DirectIo.ON}
_SCOPES = {Scope.GLOBAL: _native.Scope.GLOBAL, Scope.LAYER: _native.Scope.LAYER}
_HUGE = {Capability.OFF: HugePages.OFF, Capability.AUTO: HugePages.AUTO, Capability.ON: HugePages.ON}
#: Room for the index: entries, snapshots and state, several times over (LMDB is copy on write as well).
_INDEX_BYTES = 64 << 20


class _Closable(Protocol):
    def close(self) -> None: ...


@dataclass
class Parts:
    """The parts of an open store, in the order in which they were made."""

    directory: Path
    identity: str
    config: StoreConfig
    adamw: AdamWConfig
    lease: Lease
    engine: Engine
    arena: Arena
    index: Index
    slots: SlotMap
    cache: HostCache
    recording: RecordingResidency | None
    published: bool = False

    def meta(self, schemas: Sequence[RecordSchema]) -> dict[str, object]:
        """What the index says of the store itself."""
        return {
            "format": FORMAT_VERSION,
            "uuid": self.identity,
            "schemas": [schema.as_json() for schema in schemas],
        }

    def close(self) -> None:
        """The engine first: when it has stopped, nothing moves any more. The lease last."""
        with contextlib.ExitStack() as stack:
            parts: list[_Closable | None] = [self.lease, self.index, self.slots, self.recording, self.engine]
            if not self.published:
                stack.callback(_remove_content, self.directory)
            for part in parts:
                if part is not None:
                    stack.callback(part.close)


def create(
    directory: Path,
    schemas: Sequence[RecordSchema],
    config: StoreConfig,
    adamw: AdamWConfig,
    trace: Path | None,
    io_log: Path | None,
) -> Parts:
    if not schemas:
        raise StoreFormatError(f"{directory}: a store needs at least one record schema")
    check_budget(config, schemas)
    made = make_directory(directory)
    try:
        return _build(directory, str(uuid.uuid4()), schemas, config, adamw, trace, io_log)
    except BaseException:
        remove_unpublished(directory, made)
        raise


def make_directory(directory: Path) -> bool:
    """Makes an empty directory of ``directory``; says whether it had to be created.

    What a creation that was killed before its first commit left behind is no store (it has no identity) and is
    removed. Raises StoreFormatError for a directory that holds anything else.
    """
    if not directory.exists():
        directory.mkdir(parents=True)
        return True
    foreign = sorted(child.name for child in directory.iterdir() if child.name not in _OWN_NAMES)
    if foreign:
        raise StoreFormatError(
            f"{directory}: expected an empty or missing directory for a new store, found {foreign[0]!r}"
        )
    with Lease(directory):
        _remove_content(directory)
    return False


def remove_unpublished(directory: Path, made: bool) -> None:
    """Takes back a creation that never had a commit."""
    _remove_content(directory)
    if made:
        directory.rmdir()


def _remove_content(directory: Path) -> None:
    for child in directory.iterdir():
        if child.is_dir():
            shutil.rmtree(child)
        else:
            child.unlink()


def open_existing(
    directory: Path, config: StoreConfig, adamw: AdamWConfig, trace: Path | None, io_log: Path | None
) -> Parts:
    schemas = read_schemas(directory)
    check_budget(config, schemas)
    parts = _build(directory, read_identity(directory), schemas, config, adamw, trace, io_log)
    parts.published = True
    return parts


def read_schemas(directory: Path) -> list[RecordSchema]:
    """The record schemas of the store in ``directory``, which nobody may have open."""
    identity = read_identity(directory)
    with Lease(directory), contextlib.closing(Index(directory / "index", map_bytes=_INDEX_BYTES)) as index:
        meta = index.read_meta()
    if meta.get("uuid") != identity or meta.get("format") != FORMAT_VERSION:
        raise StoreFormatError(f"{directory}: the index belongs to another store or format version")
    raw = meta.get("schemas")
    if not isinstance(raw, list):
        raise StoreFormatError(f"{directory}: the index has no record schemas")
    return [RecordSchema.from_json(item) for item in raw]


def read_identity(directory: Path) -> str:
    """The uuid of the store in ``directory``. Raises StoreMissingError or StoreFormatError."""
    path = directory / IDENTITY
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise StoreMissingError(f"{directory}: no store here ({IDENTITY} is missing)") from error
    except ValueError as error:
        raise StoreFormatError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT_VERSION:
        found = value.get("format") if isinstance(value, dict) else None
        raise StoreFormatError(f"{path}: format version {found}, expected {FORMAT_VERSION}")
    return str(value["uuid"])


def publish(directory: Path, identity: str) -> None:
    """After the first commit, atomically: a directory with an identity is a whole store."""
    content = {"format": FORMAT_VERSION, "uuid": identity, "directory": 0, "directories": 1}
    temporary = directory / f"{IDENTITY}.new"
    with open(temporary, "w") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / IDENTITY)
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Budgets ----------------------------------------------------------------------------------------------------


def _section_sizes(schemas: Sequence[RecordSchema]) -> list[list[int]]:
    """Per cached schema, the section sizes (bytes) of all of its groups."""
    cached = [schema for schema in schemas if schema.placement is Placement.CACHED]
    return [[s.nbytes for group in Group for s in schema.layout(group).sections] for schema in cached]


def minimum_host_budget(schemas: Sequence[RecordSchema]) -> int:
    """Fewest bytes of host cache that one record of each schema can be worked on in: all its groups at once."""
    sizes = _section_sizes(schemas)
    frame = choose_frame_bytes([size for sections in sizes for size in sections])
    return max((frames_of(sections, frame) for sections in sizes), default=1) * frame


def check_budget(config: StoreConfig, schemas: Sequence[RecordSchema]) -> None:
    """Raises BudgetError naming the minimum."""
    minimum = minimum_host_budget(schemas)
    if config.host_budget < minimum:
        raise BudgetError(
            f"host_budget: {config.host_budget} bytes cannot hold one record with its gradient; "
            f"the minimum is {minimum} bytes"
        )


# Building ---------------------------------------------------------------------------------------------------


def _build(
    directory: Path,
    identity: str,
    schemas: Sequence[RecordSchema],
    config: StoreConfig,
    adamw: AdamWConfig,
    trace: Path | None,
    io_log: Path | None,
) -> Parts:
    with contextlib.ExitStack() as stack:
        lease = stack.enter_context(Lease(directory))
        engine = make_engine(config.io, lease_fd=lease.fd, log_path=io_log)
        stack.callback(engine.close)
        sizes = [size for sections in _section_sizes(schemas) for size in sections]
        frame = choose_frame_bytes(sizes)
        frames = max(config.host_budget // frame, 1)
        arena = Arena(frames * frame, _HUGE[config.io.huge_pages])
        index = Index(directory / "index", map_bytes=_INDEX_BYTES)
        stack.callback(index.close)
        slots = SlotMap(engine, directory, schemas, _DIRECT[config.io.direct])
        stack.callback(slots.close)
        residency, recording = _make_residency(config, frames, frame, trace)
        if recording is not None:
            stack.callback(recording.close)
        cache = HostCache(
            engine=engine, arena=arena, frame_bytes=frame, residency=residency, backing=slots
        )
        parts = Parts(
            directory, identity, config, adamw, lease, engine, arena, index, slots, cache, recording
        )
        stack.pop_all()
        return parts


def _make_residency(
    config: StoreConfig, frames: int, frame_bytes: int, trace: Path | None
) -> tuple[Residency, RecordingResidency | None]:
    """The residency core that ``config`` asks for; with ``trace``, inside a wrapper that records its input."""
    options: dict[str, str | float] = {}
    if config.cache.policy is PolicyName.LFU_DECAY:
        options = {
            "variant": config.cache.variant.value,
            "threshold": config.cache.threshold,
            "beta": config.cache.decay,
            "interval": config.cache.decay_every,
        }
    settings: dict[str, Any] = {
        "policy": config.cache.policy.value,
        "policy_options": options,
        "scope": _SCOPES[config.cache.scope],
        "lookahead_frames": min(config.lookahead // frame_bytes, frames),
    }
    if trace is not None:
        recording = RecordingResidency(trace, frames, **settings)
        return recording, recording
    return _native.Residency(frames, **settings), None


def make_engine(io: IoConfig, *, lease_fd: int = -1, log_path: Path | None = None) -> Engine:
    """An engine as ``io`` says. Raises OSError when a backend that is ON is refused."""
    return Engine(
        backend=_BACKENDS[io.backend],
        io_threads=io.threads,
        queue_depth=io.queue_depth,
        chunk_bytes=io.chunk_bytes,
        compute_threads=io.compute_threads,
        lease_fd=lease_fd,
        log_path=None if log_path is None else str(log_path),
    )


@contextlib.contextmanager
def scratch_buffers(layout: GroupLayout) -> Iterator[list[Buffer]]:
    """Memory of its own for one slot of ``layout``: one Buffer a section."""
    arena = Arena(layout.slot_bytes, HugePages.OFF)
    sections, offset = [], 0
    for section in layout.sections:
        sections.append(Buffer(arena, [(offset, section.padded_nbytes)], section.nbytes))
        offset += section.padded_nbytes
    yield sections


class Translation:
    """Turns the engine's ChecksumMismatch into a ChecksumError that names key and section."""

    def __init__(self, explain: Callable[[_native.ChecksumMismatch], ChecksumError]) -> None:
        self._explain = explain

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(value, _native.ChecksumMismatch):
            raise self._explain(value) from value
