"""The native core as Python sees it. Arrays are numpy; nothing here knows torch."""

import enum
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

# ---- base

class ChecksumMismatch(Exception):
    """A section read from a file is not what was written there.

    ``args`` is (message, path, file_offset, section_index).
    """

    path: str
    file_offset: int  # bytes, where the section starts
    section_index: int  # within its transfer
    expected: int
    actual: int

class CancelledError(Exception):
    """The operation, or one that it follows, was cancelled before it started."""

class EngineClosed(RuntimeError):
    """The engine was closed before the operation started."""

class ResultForgotten(RuntimeError):
    """The operation failed, or may have, too long ago for its error to be kept."""

# ---- memory

class HugePages(enum.Enum):
    """Whether an arena asks for huge pages. ON raises OSError when the kernel grants none."""

    OFF = 0
    AUTO = 1
    ON = 2

class Arena:
    """``nbytes`` of zeroed memory at a 2 MiB boundary, every page there from the start.

    Raises OSError (ENOMEM) at once when it is not to be had. Freed when the last of the object, its buffers,
    views and operations in flight has gone.
    """

    def __init__(self, nbytes: int, huge_pages: HugePages = ...) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def huge_bytes(self) -> int:
        """Bytes that huge pages back now. Reads /proc/self/smaps: not for a hot path."""

    def view(self, offset: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """A writable view of ``[offset, offset + nbytes)``, by default to the end. IndexError outside."""

class Buffer:
    """An immutable run of ``nbytes`` bytes over spans ``(offset, capacity)`` of an arena, in bytes.

    Capacity beyond ``nbytes`` is room for the padding of direct I/O. IndexError for a span outside the arena,
    ValueError for spans too small.
    """

    def __init__(self, arena: Arena, spans: Sequence[tuple[int, int]], nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def spans(self) -> list[tuple[int, int]]: ...
    @property
    def contiguous(self) -> bool:
        """Whether the content is one piece of memory (adjacent spans count as one)."""

    def array(self) -> NDArray[np.uint8]:
        """A writable view of the content. ValueError when it is in several pieces."""

    def arrays(self) -> list[NDArray[np.uint8]]:
        """Writable views of the content's pieces, in order."""

    def copy_to(self, out: NDArray[np.uint8]) -> None:
        """Gathers the content into a C-contiguous uint8 array of ``nbytes``; ValueError for another size."""

    def copy_from(self, data: NDArray[np.uint8]) -> None:
        """Scatters a C-contiguous uint8 array of ``nbytes`` into the content; ValueError for another size."""

class CrcTable:
    """``n`` crc32c values that writes store and reads compare."""

    def __init__(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    def array(self) -> NDArray[np.uint32]:
        """A writable view."""

class DoubleTable:
    """``n`` float64 that operations store."""

    def __init__(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    def array(self) -> NDArray[np.float64]:
        """A writable view."""

# ---- io

class FileCreate(enum.Enum):
    NO = 0
    YES = 1

class DirectIo(enum.Enum):
    """Whether a file is opened past the page cache too. ON raises OSError where it cannot be."""

    OFF = 0
    AUTO = 1
    ON = 2

class IoBackend(enum.Enum):
    AUTO = 0
    URING = 1
    THREADS = 2
    PMEM = 3

class MapSync(enum.Enum):
    """Whether the pmem backend's mappings make stores durable by themselves. ON fails where they cannot."""

    OFF = 0
    AUTO = 1
    ON = 2

class Priority(enum.Enum):
    """DEMAND passes ahead of everything queued; the others go in order of arrival."""

    DEMAND = 0
    SPECULATIVE = 1
    WRITE_BACK = 2

class Meter:
    """What was moved to and from the files that share it, and how long anything was under way."""

    def __init__(self) -> None: ...
    def add(self, read_bytes: int, written_bytes: int, start_ns: int, end_ns: int) -> None:
        """Counts a transfer that took the interval, as the engine does for those of its files."""

    def reading(self) -> tuple[int, int, float]:
        """Bytes read, bytes written, and seconds in which at least one transfer or sync was under way."""

class File:
    """A file opened for reading and writing, through the page cache and, where it can be, past it.

    Its transfers and syncs are counted by ``meter``, if any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: FileCreate = ...,
        direct: DirectIo = ...,
        meter: Meter | None = None,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def direct(self) -> bool: ...
    @property
    def direct_reason(self) -> str:
        """Why there is no direct I/O; empty when there is."""

    def map_sync_reason(self) -> str:
        """Why a mapping of the file needs a sync (msync); empty where stores are durable by themselves."""

    @property
    def memory_alignment(self) -> int: ...
    @property
    def offset_alignment(self) -> int: ...
    def allocate(self, offset: int, nbytes: int) -> None:
        """Reserves blocks, lengthening the file. OSError (ENOSPC) when they are not to be had."""

    def punch(self, offset: int, nbytes: int) -> None:
        """Gives blocks back: they read as zeros. The size stays."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Operations in flight keep their descriptors until they have ended."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

# ---- engine

class Dtype(enum.Enum):
    FP32 = 0
    BF16 = 1

class Activity(enum.Enum):
    """What an operation does."""

    OTHER = 0
    READ = 1
    WRITE = 2
    SYNC = 3
    PUNCH = 4
    COPY = 5
    FILL_ZERO = 6
    ACCUMULATE = 7
    SUM_OF_SQUARES = 8
    ADAMW = 9

class Link:
    """A link of ``bandwidth`` (bytes a second) and ``latency`` (seconds) whose transfers follow one another.

    A transfer that is asked for at ``now`` ends at ``max(now, end of the one before) + latency + nbytes / bandwidth``,
    rounded up to a nanosecond. ValueError unless the bandwidth is positive and the latency finite and not negative.

    With a ``burst`` (bytes) it is a token bucket: time unused is credit, at most the burst, and a transfer for which
    there is credit ends at once. A hold that nobody waits for ends only when half of the burst is there again.
    """

    def __init__(self, bandwidth: float = ..., latency: float = 0.0, burst: float = 0.0) -> None: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def latency(self) -> float: ...
    def reserve(self, nbytes: int, now_ns: int | None = None) -> int:
        """The end of a transfer asked for now, in ns of CLOCK_MONOTONIC. Whoever transfers waits until then."""

    def stats(self) -> dict[str, Any]:
        """``transfers``, ``nbytes``, ``busy_s`` since it was made."""

    def level(self, now_ns: int | None = None) -> float:
        """Bytes of credit: at most the burst, negative where transfers wait."""

    def set_level(self, nbytes: float, now_ns: int | None = None) -> None: ...
    @property
    def blocked_ns(self) -> int:
        """Time in which somebody waited for at least one hold that this link alone kept from ending."""

class Engine:
    """Background operations. Each method returns a ticket at once; ``after`` names earlier tickets only.

    An operation that fails, fails all that follow it with the same error, and whoever waits gets it: OSError
    with errno and path, ChecksumMismatch, CancelledError, EngineClosed. Arguments that cannot work are a
    ValueError at once. After a failed write or sync no later one is tried (``poisoned``).
    """

    def __init__(
        self,
        *,
        backend: IoBackend = ...,
        io_threads: int = 4,
        queue_depth: int = 32,
        chunk_bytes: int = 1 << 20,
        compute_threads: int = 1,
        lease_fd: int = -1,
        map_sync: MapSync = ...,
        log_path: str | os.PathLike[str] | None = None,
        kept_errors: int = 4096,
        kept_failures: int = 1 << 20,
    ) -> None: ...
    def read(
        self,
        file: File,
        offset: int,
        sections: Sequence[Buffer],
        crcs: CrcTable | None = None,
        first_crc: int = 0,
        *,
        align: int = 4096,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """Reads sections that follow one another from ``offset``, each padded to ``align`` (a power of two).

        Every section needs room for its padding. With ``crcs``, section i is compared with
        ``crcs[first_crc + i]`` as it stands when the bytes have arrived.
        """

    def write(
        self,
        file: File,
        offset: int,
        sections: Sequence[Buffer],
        crcs: CrcTable | None = None,
        first_crc: int = 0,
        *,
        align: int = 4096,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """Writes sections as ``read`` reads them; zeroes their padding and stores their checksums first."""

    def sync(self, file: File, *, after: Sequence[int] = (), priority: Priority = ...) -> int:
        """fdatasync: what ``after`` names is durable once it is done."""

    def punch(
        self,
        file: File,
        offset: int,
        nbytes: int,
        *,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """Gives blocks back: they read as zeros. A failure poisons nothing."""

    def copy(
        self, dst: Buffer, src: Buffer, *, after: Sequence[int] = (), priority: Priority = ...
    ) -> int: ...
    def fill_zero(self, dst: Buffer, *, after: Sequence[int] = (), priority: Priority = ...) -> int: ...
    def accumulate(
        self,
        dst: Buffer,
        src: Buffer,
        src_dtype: Dtype = ...,
        *,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """``dst += src``; dst is fp32."""

    def sum_of_squares(
        self,
        src: Buffer,
        out: DoubleTable,
        index: int,
        *,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """``out[index]`` = the sum of squares of src (fp32); the same bits wherever its spans lie."""

    def adamw(
        self,
        weight: Sequence[Buffer],
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        grad: Buffer | None,
        steps: NDArray[np.float32],
        grad_scale: float = 1.0,
        *,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """AdamW steps over one record in one pass. ``weight`` is [fp32] or [bf16 rounding, int16 remainder].

        ``steps`` is [k, 7], C-contiguous, copied: lr, beta1, beta2, eps, weight_decay, bias_correction1,
        sqrt(bias_correction2). All but the last step have a zero gradient.
        """

    def barrier(self, after: Sequence[int] = (), *, priority: Priority = ...) -> int:
        """Done when all of ``after`` is done."""

    def external(self, *, after: Sequence[int] = (), priority: Priority = ...) -> int:
        """Done when complete_external() was called and ``after`` is done: for events outside the engine."""

    def hold(
        self,
        link: Link,
        nbytes: int,
        activity: Activity = ...,
        *,
        after: Sequence[int] = (),
        priority: Priority = ...,
    ) -> int:
        """Done at the end of a transfer of ``nbytes`` on ``link`` that is asked for when ``after`` is done.

        It moves nothing: it stands beside the operation that does, and a barrier joins the two. The link serves in
        order of asking, whatever the priorities. Cancelled, it keeps its turn on the link.
        """

    def complete_external(self, ticket: int, error: str = "") -> None:
        """Ends an external operation; with an ``error`` it fails (RuntimeError)."""

    def wait(self, ticket: int, timeout_s: float | None = None) -> None:
        """Returns when the operation succeeded, raises its error, or TimeoutError. Makes it urgent."""

    def wait_all(self, tickets: Sequence[int], timeout_s: float | None = None) -> None:
        """Waits for each in turn; raises the first error met."""

    def done(self, ticket: int) -> bool:
        """Whether it has finished, well or not."""

    def cancel(self, ticket: int) -> bool:
        """Takes back an operation that has not started; it and what follows it fail with CancelledError."""

    def promote(self, ticket: int) -> None:
        """Makes it, and what it waits for, as urgent as a demanded one."""

    def event_fd(self) -> int:
        """Readable when a ticket given to notify() has finished. Belongs to the engine."""

    def notify(self, ticket: int) -> None: ...
    def drain_notified(self) -> list[int]:
        """The tickets given to notify() that have finished since the last call."""

    def stats(self) -> dict[str, Any]:
        """Bytes, operations and seconds of service by kind since the start; what waits and runs now."""

    @property
    def backend(self) -> str:
        """``uring`` or ``threads``."""

    @property
    def backend_reason(self) -> str:
        """Why AUTO fell back; empty when it did not."""

    @property
    def poisoned(self) -> str | None:
        """The error of the first write or sync that failed."""

    def record_spans(self, capacity: int) -> None:
        """From now on remembers when the last ``capacity`` operations ran (0: none of them)."""

    def drain_spans(self) -> tuple[list[tuple[Activity, bool, int, int, int, int]], int]:
        """(activity, held, ticket, start_ns, end_ns, nbytes) of what ended since the last call, in order of ending, and
        how many more were overwritten before it. ``held``: the turn on a limited link, not the operation itself.
        """

    def log_mark(self, text: str) -> None:
        """A mark in the event log; nothing without ``log_path``."""

    def close(self) -> None:
        """Lets what is running finish, fails the rest with EngineClosed, joins the threads."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

# ---- optim: AdamW, gradient sums, split weights, checksums, instruction sets

_F32: TypeAlias = npt.NDArray[np.float32]
_U16: TypeAlias = npt.NDArray[np.uint16]
_I16: TypeAlias = npt.NDArray[np.int16]

class InstructionSet(enum.Enum):
    SCALAR = 0
    AVX2 = 1
    AVX512 = 2

def instruction_set() -> InstructionSet: ...
def instruction_set_supported(isa: InstructionSet) -> bool: ...
def crc32c(data: npt.NDArray[Any], crc: int = 0) -> int: ...
def crc32c_scalar(data: npt.NDArray[Any], crc: int = 0) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, len_b: int) -> int: ...
def crc32c_method() -> str: ...
def adamw(
    weight: _F32 | tuple[_U16, _I16],
    exp_avg: _F32,
    exp_avg_sq: _F32,
    grad: _F32 | None,
    steps: _F32,
    grad_scale: float = 1.0,
    isa: InstructionSet | None = None,
) -> None: ...
def accumulate(dst: _F32, src: _F32) -> None: ...
def accumulate_bf16(dst: _F32, src: _U16) -> None: ...
def widen_bf16(dst: _F32, src: _U16) -> None: ...
def sum_of_squares(src: _F32, isa: InstructionSet | None = None) -> float: ...
def all_finite(src: _F32) -> bool: ...
def split_bf16(hi: _U16, lo: _I16, src: _F32) -> None: ...
def merge_bf16(dst: _F32, hi: _U16, lo: _I16) -> None: ...

# ---- cache and sim: residency decisions, policies, replay

class CapacityError(ValueError):
    """More frames must be resident at once than there can be: ``needed_frames`` of capacity (or quota)."""

    needed_frames: int

class Decision(enum.IntEnum):
    HIT = 0
    FETCH = 1
    CREATE = 2
    EVICT = 3
    EVICT_WRITE = 4
    WRITE_BACK = 5
    DROP = 6

class Scope(enum.Enum):
    GLOBAL = 0
    LAYER = 1

class GroupOrder(enum.Enum):
    RESIDENT_FIRST = 0
    KEY = 1

def policy_names() -> list[str]: ...
def check_policy(name: str, options: Mapping[str, float | str] = ...) -> None: ...
def policy_headroom_frames(name: str, options: Mapping[str, float | str] = ...) -> int: ...
def half_life(beta: float, interval: float) -> float: ...
def beta_for_half_life(half_life: float, interval: float) -> float: ...
def lfu_decay_options(options: Mapping[str, float | str] = ...) -> LfuDecayOptions: ...

class LfuDecayOptions:
    @property
    def variant(self) -> str: ...
    @property
    def threshold(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def interval(self) -> int: ...
    @property
    def half_life(self) -> float: ...

class Clock(enum.Enum):
    REQUEST = 0
    STEP = 1

class Candidates:
    """What a policy may know of entries while it chooses; ValueError once select() has returned."""

    def evictable(self, entry: int) -> bool: ...
    def frames(self, entry: int) -> int: ...

class EntryState:
    @property
    def resident(self) -> bool: ...
    @property
    def dirty(self) -> bool: ...
    @property
    def stored(self) -> bool: ...
    @property
    def held(self) -> bool: ...
    @property
    def pins(self) -> int: ...

class ResidencyObserver: ...

class EventBuffer(ResidencyObserver):
    def __init__(self, rows: int, sink: Callable[..., object]) -> None: ...
    def flush(self) -> None: ...
    def records(
        self,
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint16]]: ...
    @property
    def late_records(self) -> int: ...

class Residency:
    def __init__(
        self,
        capacity_frames: int,
        *,
        policy: str = "lfu-decay",
        policy_options: Mapping[str, float | str] = ...,
        scope: Scope = Scope.GLOBAL,
        lookahead_frames: int = 0,
        layer_quotas: Sequence[int] = ...,
        group_order: GroupOrder = GroupOrder.RESIDENT_FIRST,
    ) -> None: ...
    def observe(self, observer: ResidencyObserver | None) -> None: ...
    def start_at(self, step: int) -> None: ...
    def add_record(
        self, layer: int, group_frames: Sequence[int], group_bytes: Sequence[int], stored_mask: int
    ) -> int: ...
    def set_stored(self, record: int, mask: int) -> None: ...
    def begin_access(
        self, phase: int, layer: int, records: NDArray[np.uint32], flags: NDArray[np.uint16]
    ) -> tuple[int, NDArray[np.uint32]]: ...
    def next_group(
        self,
    ) -> tuple[
        NDArray[np.uint32],
        tuple[NDArray[np.uint8], NDArray[np.uint32]],
        tuple[NDArray[np.uint8], NDArray[np.uint32]],
    ]: ...
    def end_unit(self, unit: int) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]: ...
    def end_group(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]: ...
    def prefetch(
        self, phase: int, layer: int, records: NDArray[np.uint32], flags: NDArray[np.uint16]
    ) -> tuple[int, tuple[NDArray[np.uint8], NDArray[np.uint32]]]: ...
    def cancel_prefetch(self) -> None: ...
    def pin(self, records: NDArray[np.uint32], flags: NDArray[np.uint16]) -> None: ...
    def unpin(
        self, records: NDArray[np.uint32], flags: NDArray[np.uint16]
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]: ...
    def clean(
        self, records: NDArray[np.uint32] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]: ...
    def drop(self, entries: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]: ...
    def end_step(self) -> None: ...
    def stats(self) -> dict[str, object]: ...
    def state(self, entry: int) -> EntryState: ...
    def resident_entries(self) -> NDArray[np.uint32]: ...
    def dirty_entries(self) -> NDArray[np.uint32]: ...
    @property
    def policy_failed(self) -> bool: ...
    @property
    def used_frames(self) -> int: ...
    @property
    def capacity_frames(self) -> int: ...
    @property
    def lookahead_frames(self) -> int: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def layer_quotas(self) -> list[int]: ...
    @property
    def group_order(self) -> GroupOrder: ...
    @property
    def policy(self) -> str: ...
    @property
    def policy_options(self) -> dict[str, float | str]: ...
    @property
    def record_count(self) -> int: ...
    @property
    def access_open(self) -> bool: ...
    @property
    def group_open(self) -> bool: ...

class Replay:
    def __init__(
        self,
        residency: Residency,
        late_layers: NDArray[np.uint32],
        late_frames: NDArray[np.uint32],
        late_bytes: NDArray[np.uint64],
        late_stored: NDArray[np.uint16],
    ) -> None: ...
    def run(
        self,
        kinds: NDArray[np.uint8],
        phases: NDArray[np.uint8],
        at: NDArray[np.uint32],
        layers: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        records: NDArray[np.uint32],
        flags: NDArray[np.uint16],
    ) -> None: ...
    def finish(self) -> None: ...

class Contract(enum.Enum):
    """How an event's entries are asked for: as one set none of which evicts another, or one after another."""

    ATOMIC = 0
    SEQUENTIAL = 1

class Detail(enum.Enum):
    """What is counted beside the totals: by step and layer, or by event as well."""

    STEPS = 0
    EVENTS = 1

class SimulationResult(TypedDict):
    """Counts after the warm-up; ``step_*`` by step in the order of steps, ``layer_*`` by layer (or empty).

    ``event_*`` are by event, empty unless asked for.
    """

    requests: int
    hits: int
    misses: int
    evictions: int
    write_backs: int
    missed_frames: int
    written_frames: int
    missed_bytes: int
    written_bytes: int
    starved: int
    step_requests: NDArray[np.uint64]
    step_misses: NDArray[np.uint64]
    step_write_backs: NDArray[np.uint64]
    event_missed_bytes: NDArray[np.uint64]
    event_written_bytes: NDArray[np.uint64]
    layer_hits: NDArray[np.uint64]
    layer_misses: NDArray[np.uint64]

def bound_names() -> list[str]: ...
def simulate(
    offsets: NDArray[np.uint64],
    entries: NDArray[np.uint32],
    writes: NDArray[np.uint8] | None = None,
    layers: NDArray[np.uint32] | None = None,
    phases: NDArray[np.uint8] | None = None,
    steps: NDArray[np.uint32] | None = None,
    sizes: NDArray[np.uint32] | None = None,
    entry_layers: NDArray[np.uint32] | None = None,
    records: NDArray[np.uint32] | None = None,
    groups: NDArray[np.uint8] | None = None,
    bytes: NDArray[np.uint64] | None = None,
    pinned: NDArray[np.uint8] | None = None,
    *,
    policy: str,
    options: Mapping[str, float | str] = ...,
    capacity_frames: int,
    scope: Scope = ...,
    layer_quotas: Sequence[int] = ...,
    contract: Contract = ...,
    warmup_events: int = 0,
    detail: Detail = ...,
    group_order: GroupOrder = ...,
) -> SimulationResult:
    """A policy (or a bound: Belady 1966) over columns: event i asks for ``entries[offsets[i]:offsets[i + 1]]``.

    ``writes`` is by request; ``layers``, ``phases`` and ``steps`` (non-decreasing) are by event; ``sizes``
    (frames; 1 each), ``entry_layers``, ``records`` (which entries are of one record; each of its own), ``groups``
    (which of its record's an entry is; its place among neighbours), ``bytes`` (1 a frame) and ``pinned`` (never
    leaves once resident) are by entry, entries being numbered from 0. Counts exactly what a
    Residency of this policy counts. The first ``warmup_events`` are carried out and not counted. ValueError,
    naming the column, for what does not fit together; CapacityError when what must be resident at once does not.
    """

class StackDistances(TypedDict):
    """LRU at every capacity c: misses = cold + the sum of ``depths[c + 1:]``, evictions written ``write_backs[c]``."""

    requests: int
    cold: int  # asked for the first time
    largest_event: int  # capacities below it split an atomic event: there the counts do not hold
    depths: NDArray[np.uint64]  # [entries + 1]: requests that found their entry at this depth, from 1
    write_backs: NDArray[np.uint64]  # [entries + 1], or empty without ``writes``

def stack_distances(
    offsets: NDArray[np.uint64],
    entries: NDArray[np.uint32],
    writes: NDArray[np.uint8] | None = None,
    *,
    contract: Contract = ...,
    warmup_events: int = 0,
) -> StackDistances:
    """One pass over columns as of :func:`simulate`, entries of one size, one cache for all (Mattson et al. 1970)."""
