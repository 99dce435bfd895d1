"""
tierstore's native core: arenas, files, the ticket engine, AdamW, cache residency, replay.
"""

from collections.abc import Callable, Mapping, Sequence
import enum
import os
from typing import Annotated, Any, Self, TypedDict, overload

import numpy
import numpy.typing
from numpy.typing import NDArray

class SimulationResult(TypedDict):
    """Counts after the warm-up; ``step_*`` by step in the order of steps, ``layer_*`` by layer (or empty).

    ``event_*`` are by event, empty unless requested (``Detail.EVENTS``).
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
    not_admitted: int
    step_requests: NDArray[numpy.uint64]
    step_misses: NDArray[numpy.uint64]
    step_write_backs: NDArray[numpy.uint64]
    event_missed_bytes: NDArray[numpy.uint64]
    event_written_bytes: NDArray[numpy.uint64]
    event_misses: NDArray[numpy.uint32]
    event_write_backs: NDArray[numpy.uint32]
    layer_hits: NDArray[numpy.uint64]
    layer_misses: NDArray[numpy.uint64]

class StackDistances(TypedDict):
    """LRU at every capacity c: misses = cold + the sum of ``depths[c + 1:]``, evictions written ``write_backs[c]``.

    ``cold``: first requests of entries. ``largest_event``: capacities below it split an atomic event, and there
    the counts do not hold. ``depths`` [entries + 1]: requests that found their entry at this depth, from 1.
    ``write_backs`` [entries + 1], or empty without ``writes``.
    """

    requests: int
    cold: int
    largest_event: int
    depths: NDArray[numpy.uint64]
    write_backs: NDArray[numpy.uint64]

class ChecksumMismatch(Exception):
    """
    A section read from a file is not what was written there. ``args`` is (message, path, file_offset,
    section_index).
    """

    path: str
    file_offset: int
    section_index: int
    expected: int
    actual: int

class CancelledError(Exception):
    """
    The operation, or one that it follows, was cancelled before it started.
    """

class EngineClosed(RuntimeError):
    """The engine was closed before the operation started."""

class ResultForgotten(RuntimeError):
    """
    The operation failed, or may have, too long ago for its error to be kept.
    """

class HugePages(enum.Enum):
    """
    Whether an arena asks for huge pages. ON raises OSError when the kernel grants none.
    """

    OFF = 0

    AUTO = 1

    ON = 2

class Arena:
    """
    ``nbytes`` of zeroed memory at a 2 MiB boundary, every page there from the start.

    Raises OSError (ENOMEM) at once when it is not to be had. Meanwhile signals are handled, and ``progress`` is
    called with the bytes that are there; if either raises, nothing is taken. Freed when the last of the object,
    its buffers, views and operations in flight has gone.
    """

    def __init__(
        self,
        nbytes: int,
        huge_pages: HugePages = HugePages.AUTO,
        progress: Callable[[int], None] | None = None,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def huge_bytes(self) -> int:
        """
        Bytes that huge pages back now. Reads /proc/self/smaps: not for a hot path.
        """

    def view(
        self, offset: int = 0, nbytes: int | None = None
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        A writable view of ``[offset, offset + nbytes)``, by default to the end. IndexError outside.
        """

class Buffer:
    """
    An immutable run of ``nbytes`` bytes over spans ``(offset, capacity)`` of an arena, in bytes.

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
        """
        Whether the content is one piece of memory (adjacent spans count as one).
        """

    def array(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        A writable view of the content. ValueError when it is in several pieces.
        """

    def arrays(self) -> list[Annotated[NDArray[numpy.uint8], dict(shape=(None,))]]:
        """Writable views of the content's pieces, in order."""

    def copy_to(
        self, out: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")]
    ) -> None:
        """
        Gathers the content into an array of ``nbytes``; ValueError for another size.
        """

    def copy_from(
        self,
        data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """
        Scatters an array of ``nbytes`` into the content; ValueError for another size.
        """

class CrcTable:
    """``n`` crc32c values that writes store and reads compare."""

    def __init__(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    def array(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """A writable view."""

class DoubleTable:
    """``n`` float64 that operations store."""

    def __init__(self, n: int) -> None: ...
    def __len__(self) -> int: ...
    def array(self) -> Annotated[NDArray[numpy.float64], dict(shape=(None,))]:
        """A writable view."""

class NumberSet:
    """
    A set of numbers (u32) as bits: for numbers that lie close together, in little memory.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, number: int) -> bool: ...
    def add(self, number: int) -> bool:
        """Returns whether it was not there."""

    def discard(self, number: int) -> bool:
        """Returns whether it was there."""

    def clear(self) -> None: ...
    def update(
        self,
        numbers: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Adds them all."""

    def difference_update(
        self,
        numbers: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None:
        """Removes those of them that are there."""

    def pop_first(self) -> int:
        """Removes the smallest and returns it. IndexError if there is none."""

    def smallest(self, count: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The ``count`` smallest, ascending, or all."""

    def largest(self, count: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The ``count`` largest, ascending, or all."""

    def array(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """All of them, ascending."""

class KeyTable:
    """
    Keys, numbered from 0 as they come: a dictionary and a list in little memory.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def __contains__(self, key: str) -> bool: ...
    def find(self, key: str) -> int:
        """Its number; -1 if there is none."""

    def add(self, key: str) -> int:
        """Returns the number of a new key. ValueError if it is there already."""

    def add_all(self, keys: list[bytes]) -> None:
        """Adds keys, as UTF-8. ValueError at one that is there already."""

    def key(self, number: int) -> str:
        """IndexError if there is none."""

    def pop(self) -> None:
        """Removes the key that came last."""

    def ordered(self, count: int = ...) -> list[str]:
        """The keys in order, of those with numbers below ``count``."""

    def sorted(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The numbers, in the order of their keys."""

def entries_crc32c(database: bytes, items: list[tuple[bytes, bytes]]) -> int:
    """
    The sum, modulo 2^64, of the crc32c of ``DATABASE \\0 KEY \\0 VALUE`` of each item.
    """

class FileAccess(enum.Enum):
    READ_WRITE = 0

    READ = 1

class FileCreate(enum.Enum):
    NO = 0

    YES = 1

class DirectIo(enum.Enum):
    """
    Whether a file is opened past the page cache too. ON raises OSError where it cannot be.
    """

    OFF = 0

    AUTO = 1

    ON = 2

class IoBackend(enum.Enum):
    AUTO = 0

    URING = 1

    THREADS = 2

    PMEM = 3

class MapSync(enum.Enum):
    """
    Whether the pmem backend's mappings make stores durable by themselves. ON fails where they
    cannot.
    """

    OFF = 0

    AUTO = 1

    ON = 2

class Priority(enum.Enum):
    """
    DEMAND passes ahead of everything queued; the others go in order of arrival, but IDLE work
    only when a compute thread has no other, the last queued first.
    """

    DEMAND = 0

    SPECULATIVE = 1

    WRITE_BACK = 2

    IDLE = 3

class Meter:
    """
    What was moved to and from the files that share it, and how long anything was under way.
    """

    def __init__(self) -> None: ...
    def add(self, read_bytes: int, written_bytes: int, start_ns: int, end_ns: int) -> None:
        """
        Counts a transfer that took the interval, as the engine does for those of its files.
        """

    def reading(self) -> tuple[int, int, float]:
        """
        Bytes read, bytes written, and seconds in which at least one transfer or sync was under way.
        """

class File:
    """
    A file opened for reading and writing, or for reading alone, through the page cache and, where it can be, past it.

    Its transfers and syncs are counted by ``meter``, if any.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: FileCreate = FileCreate.NO,
        direct: DirectIo = DirectIo.AUTO,
        access: FileAccess = FileAccess.READ_WRITE,
        meter: Meter | None = None,
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    def fileno(self) -> int:
        """
        The descriptor through the page cache, which closes with the file. OSError (EBADF) once closed.
        """

    @property
    def direct(self) -> bool: ...
    @property
    def direct_reason(self) -> str:
        """Why there is no direct I/O; empty when there is."""

    def map_sync_reason(self) -> str:
        """
        Why a mapping of the file needs a sync (msync); empty where stores are durable by themselves.
        """

    @property
    def memory_alignment(self) -> int: ...
    @property
    def offset_alignment(self) -> int: ...
    def allocate(self, offset: int, nbytes: int) -> None:
        """
        Reserves blocks, lengthening the file. OSError (ENOSPC) when they are not to be had.
        """

    def punch(self, offset: int, nbytes: int) -> None:
        """Gives blocks back: they read as zeros. The size stays."""

    def map(self, offset: int, nbytes: int) -> Buffer:
        """
        The bytes where a read-only mapping of the file has them: a write to them is a segmentation fault.

        The mapping stays, also once the file is closed, until the last of its buffers and views has gone. OSError (EIO)
        beyond the file's end.
        """

    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Operations in flight keep their descriptors until they have ended."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

class InstructionSet(enum.Enum):
    SCALAR = 0

    AVX2 = 1

    AVX512 = 2

def instruction_set() -> InstructionSet:
    """
    The instruction set that the kernels use. ValueError when TIERSTORE_ISA cannot be had.
    """

def instruction_set_supported(isa: InstructionSet) -> bool: ...
def crc32c(data: numpy.typing.NDArray[Any], crc: int = 0) -> int: ...
def crc32c_scalar(data: numpy.typing.NDArray[Any], crc: int = 0) -> int: ...
def crc32c_combine(crc_a: int, crc_b: int, len_b: int) -> int: ...
def crc32c_method() -> str: ...

class MomentFormat(enum.Enum):
    """How AdamW's two moments are kept."""

    FP32 = 0

    BF16 = 1

    INT8 = 2

class Moment(enum.Enum):
    """Which of AdamW's moments: their 8-bit codes differ."""

    EXP_AVG = 0

    EXP_AVG_SQ = 1

MOMENT_BLOCK: int = 256

@overload
def adamw(
    weight: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    exp_avg: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    ],
    exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    ],
    grad: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None,
    steps: Annotated[NDArray[numpy.float32], dict(shape=(None, 7), order="C", device="cpu", writable=False)],
    grad_scale: float = 1.0,
    isa: InstructionSet | None = None,
    *,
    record_hash: int = 0,
    last_step: int = 0,
    first: int = 0,
) -> None:
    """
    AdamW steps in one pass; moments in fp32, bf16 (uint16) or pairs (uint8 codes, fp32 scales). ``grad`` is fp32
    or bf16 (uint16), with the same bits.

    Narrow moments are rounded after each step by a hash of ``record_hash``, the step's number (``last_step`` is
    that of the last row) and the element's index in the record (``first`` is that of ``weight[0]``; with 8-bit moments a
    multiple of ``MOMENT_BLOCK``).
    """

@overload
def adamw(
    weight: tuple[
        Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.int16], dict(shape=(None,), order="C", device="cpu")],
    ],
    exp_avg: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    ],
    exp_avg_sq: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    ],
    grad: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None,
    steps: Annotated[NDArray[numpy.float32], dict(shape=(None, 7), order="C", device="cpu", writable=False)],
    grad_scale: float = 1.0,
    isa: InstructionSet | None = None,
    *,
    record_hash: int = 0,
    last_step: int = 0,
    first: int = 0,
) -> None: ...
def encode_moment(
    moment: Moment,
    dst: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    ],
    src: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None:
    """
    Rounds a moment of a record to nearest (ties away from zero) into bf16, or into (codes, scales).

    For import and conversion: steps round stochastically. Subnormals become zeros, an EXP_AVG_SQ that is not zero
    none; values beyond the format's largest become that; a block of 8 bits with a NaN or infinity becomes NaN.
    """

def decode_moment(
    moment: Moment,
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ],
) -> None:
    """What ``encode_moment`` or steps wrote, as fp32: exactly."""

def accumulate(
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None: ...
def accumulate_bf16(
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None: ...
def widen_bf16(
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None: ...
def sum_of_squares(
    src: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    isa: InstructionSet | None = None,
) -> float: ...
def all_finite(
    src: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> bool: ...
def split_bf16(
    hi: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu")],
    lo: Annotated[NDArray[numpy.int16], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None: ...
def merge_bf16(
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    hi: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    lo: Annotated[NDArray[numpy.int16], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None: ...

class QuantFormat(enum.Enum):
    """How weights are quantised."""

    INT8 = 0

    INT4 = 1

QUANT_BLOCK: int = 64

def quantize(
    format: QuantFormat,
    codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu")],
    scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu")],
    src: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)],
) -> bool:
    """
    Quantises a matrix, row by row in blocks of ``QUANT_BLOCK``; see docs/FORMAT.md.

    False where a value, or what its code would stand for, is not finite: codes and scales are then undefined.
    """

def dequantize(
    format: QuantFormat,
    dst: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
    codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
    scales: Annotated[NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)],
) -> None:
    """What the codes stand for, in fp32."""

class QuantProducts:
    """
    Threads that compute products with quantised matrices.

    The bits of a row of the result depend on its row of ``x`` and on the matrix alone: not on the threads, the
    instruction set or the other rows. Several threads may multiply at once; none after ``close``.
    """

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int:
        """Threads that compute, the caller's included."""

    @overload
    def multiply(
        self,
        format: QuantFormat,
        y: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        x: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        scales: Annotated[
            NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        isa: InstructionSet | None = None,
    ) -> None:
        """
        ``y = x W^T``: x (M, K), y (M, N), W of N rows and K columns; in fp32.

        uint16 arrays are bf16's bits: sums stay in fp32, and are rounded to nearest even.
        """

    @overload
    def multiply(
        self,
        format: QuantFormat,
        y: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu")],
        x: Annotated[
            NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        codes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        scales: Annotated[
            NDArray[numpy.float32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        isa: InstructionSet | None = None,
    ) -> None: ...
    def close(self) -> None:
        """Joins the threads."""

class TorchProducts:
    """
    Many products of small matrices in one call, with the bits of ``torch.mm``.

    ``library``: the path of libtorch_cpu, which this process has loaded. RuntimeError where it is not, or does not offer what
    this needs.
    """

    def __init__(self, library: str) -> None: ...
    @overload
    def multiply(
        self,
        out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu")],
        out_first: Sequence[int],
        x: Annotated[
            NDArray[numpy.float32], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        x_first: Sequence[int],
        rows: Sequence[int],
        weights: Sequence[int],
    ) -> None:
        """
        ``out[o:o + r] = x[f:f + r] W^T`` for each product: ``o``, ``f`` and ``r`` of ``out_first``, ``x_first`` and ``rows``.

        x (.., K), out (.., N) in fp32, or bf16's bits as uint16. ``weights``: addresses of matrices W, (N, K) of the same type,
        contiguous, which the caller keeps where they are. On the caller's torch threads. ValueError for rows outside.
        """

    @overload
    def multiply(
        self,
        out: Annotated[NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu")],
        out_first: Sequence[int],
        x: Annotated[
            NDArray[numpy.uint16], dict(shape=(None, None), order="C", device="cpu", writable=False)
        ],
        x_first: Sequence[int],
        rows: Sequence[int],
        weights: Sequence[int],
    ) -> None: ...
    def run(self, rows: int, n: int, k: int) -> int:
        """
        Columns that a kernel of tierstore adds up at a time in a product in bf16, to have torch's bits.

        0 where torch computes it: more rows than a few, another shape than whole tiles, or a processor without AVX512_BF16. For
        the threads that the caller has now; a trial determines them at the first call.
        """

    def count_chosen(
        self,
        bf16: bool,
        rows: int,
        k: int,
        now: int,
        added: int,
        weight: int,
        top_k: int,
        counts: Annotated[NDArray[numpy.int64], dict(shape=(None,), order="C", device="cpu")],
    ) -> None:
        """
        Adds to ``counts`` (N,) how often each row of ``weight`` has one of the ``top_k`` largest products.

        With each row of ``now + added``; of equal ones the first counts. ``now``, ``added`` (0: nothing) and ``weight``: addresses of
        contiguous matrices (rows, k), (rows, k) and (N, k), in bf16 or fp32, which the caller keeps where they are.
        """

def fade_towards(bf16: bool, count: int, decay: float, mean: int, now: int, before: int) -> None:
    """
    ``mean = decay mean + (1 - decay) (now - before)``, each of ``count`` numbers in bf16 or fp32.

    ``mean``, ``now``, ``before``: their addresses; the caller keeps them where they are.
    """

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
    """
    A link of ``bandwidth`` (bytes a second) and ``latency`` (seconds) whose transfers follow one another.

    A transfer that is requested at ``now`` ends at ``max(now, end of the one before) + latency + nbytes /
    bandwidth``, rounded up to a nanosecond. ValueError unless the bandwidth is positive and the latency finite
    and not negative.

    With a ``burst`` (bytes) it is a token bucket: time unused is credit, at most the burst, and a transfer for
    which there is credit ends at once. A hold that no caller waits for ends only when half of the burst is
    available again.
    """

    def __init__(self, bandwidth: float = float("inf"), latency: float = 0.0, burst: float = 0.0) -> None: ...
    @property
    def bandwidth(self) -> float: ...
    @property
    def latency(self) -> float: ...
    def reserve(self, nbytes: int, now_ns: int | None = None) -> int:
        """
        The end of a transfer requested now, in ns of CLOCK_MONOTONIC. The caller must wait until then.
        """

    def level(self, now_ns: int | None = None) -> float:
        """Bytes of credit: at most the burst, negative where transfers wait."""

    def set_level(self, nbytes: float, now_ns: int | None = None) -> None: ...
    @property
    def blocked_ns(self) -> int:
        """
        Time in which callers waited for at least one hold that only this link delayed.
        """

    def stats(self) -> dict[str, Any]:
        """``transfers``, ``nbytes``, ``busy_s`` since it was made."""

class Dtype(enum.Enum):
    FP32 = 0

    BF16 = 1

class Engine:
    """
    Background operations. Each method returns a ticket at once; ``after`` names earlier tickets only.

    A failed operation fails all that follow it with the same error, which each waiter gets: OSError
    with errno and path, ChecksumMismatch, CancelledError, EngineClosed. Arguments that cannot work are a
    ValueError at once. After a failed write or sync no later one is tried (``poisoned``).

    The newest ``kept_errors`` failures keep their error, and ``kept_failures`` before them their ticket: a very old
    result is a failure (ResultForgotten) rather than a wrong success.
    """

    def __init__(
        self,
        *,
        backend: IoBackend = IoBackend.AUTO,
        io_threads: int = 4,
        queue_depth: int = 32,
        chunk_bytes: int = 1048576,
        compute_threads: int = 1,
        lease_fds: Sequence[int] = (),
        map_sync: MapSync = MapSync.AUTO,
        log_path: str | os.PathLike[str] | None = None,
        kept_errors: int = 4096,
        kept_failures: int = 1048576,
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
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """
        Reads sections that follow one another from ``offset``, each padded to ``align`` (a power of two).

        Every section needs room for its padding. With ``crcs``, section i is compared with ``crcs[first_crc + i]``
        as it stands when the bytes have arrived.
        """

    def verify_mapped(
        self,
        file: File,
        offset: int,
        section: Buffer,
        crcs: CrcTable,
        crc: int,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """
        Compares a section where ``file.map(offset, ...)`` has it with ``crcs[crc]``; fails as a read does.
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
        priority: Priority = Priority.WRITE_BACK,
    ) -> int:
        """
        Writes sections as ``read`` reads them; zeroes their padding and stores their checksums first.
        """

    def sync(self, file: File, *, after: Sequence[int] = (), priority: Priority = Priority.DEMAND) -> int:
        """fdatasync: what ``after`` names is durable once it is done."""

    def punch(
        self,
        file: File,
        offset: int,
        nbytes: int,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.WRITE_BACK,
    ) -> int:
        """Gives blocks back: they read as zeros. A failure poisons nothing."""

    def copy(
        self, dst: Buffer, src: Buffer, *, after: Sequence[int] = (), priority: Priority = Priority.DEMAND
    ) -> int: ...
    def fill_zero(
        self, dst: Buffer, *, after: Sequence[int] = (), priority: Priority = Priority.DEMAND
    ) -> int: ...
    def widen(
        self,
        dst: Buffer,
        src: Buffer,
        src_dtype: Dtype,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """``dst = src``, exactly; dst is fp32."""

    def accumulate(
        self,
        dst: Buffer,
        src: Buffer,
        src_dtype: Dtype = Dtype.FP32,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """``dst += src``; dst is fp32."""

    def sum_of_squares(
        self,
        src: Buffer,
        out: DoubleTable,
        index: int,
        src_dtype: Dtype = Dtype.FP32,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """
        ``out[index]`` = the sum of squares of src; the same bits wherever its spans lie.
        """

    def adamw(
        self,
        weight: Sequence[Buffer],
        exp_avg: Buffer,
        exp_avg_sq: Buffer,
        grad: Buffer | None,
        steps: Annotated[
            NDArray[numpy.float32], dict(shape=(None, 7), order="C", device="cpu", writable=False)
        ],
        grad_scale: float = 1.0,
        *,
        moments: MomentFormat = MomentFormat.FP32,
        scales: Sequence[Buffer] = (),
        record_hash: int = 0,
        last_step: int = 0,
        squares: DoubleTable | None = None,
        index: int = 0,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """
        AdamW steps over one record in one pass. ``weight`` is [fp32] or [bf16 rounding, int16 remainder].

        ``steps`` is [k, 7], copied: lr, beta1, beta2, eps, weight_decay, bias_correction1, sqrt(bias_correction2).
        All but the last step have a zero gradient. ``grad`` is fp32 or bf16, as its size says; the bits are the same.

        ``moments`` says what exp_avg and exp_avg_sq hold: fp32; bf16 (uint16); or 8-bit codes (uint8), with
        ``scales`` [exp_avg's, exp_avg_sq's], fp32, one for every ``MOMENT_BLOCK`` elements of the record. Narrow moments
        are rounded after each step by a hash of ``record_hash`` (64 bits that name the record), the step's number
        (``last_step`` is the last row's, those above it count back) and the element's index: threads, spans, instruction
        sets and replays give the same bits.

        ``squares[index]`` = the gradient's sum of squares before it is scaled, with the bits of ``sum_of_squares``, from the
        same read of memory.
        """

    def barrier(self, after: Sequence[int] = (), *, priority: Priority = Priority.DEMAND) -> int:
        """Done when all of ``after`` is done."""

    def external(self, *, after: Sequence[int] = (), priority: Priority = Priority.DEMAND) -> int:
        """
        Done when complete_external() was called and ``after`` is done: for events outside the engine.
        """

    def hold(
        self,
        link: Link,
        nbytes: int,
        activity: Activity = Activity.OTHER,
        *,
        after: Sequence[int] = (),
        priority: Priority = Priority.DEMAND,
    ) -> int:
        """
        Done at the end of a transfer of ``nbytes`` on ``link`` that is requested when ``after`` is done.

        It moves nothing: it runs in parallel to the operation that does, and a barrier joins the two. The link serves in
        order of requests, whatever the priorities. Cancelled, it keeps its turn on the link.
        """

    def complete_external(self, ticket: int, error: str = "") -> None:
        """Ends an external operation; with an ``error`` it fails (RuntimeError)."""

    def wait(self, ticket: int, timeout_s: float | None = None) -> None:
        """
        Returns when the operation succeeded, raises its error, or TimeoutError. Makes it urgent.

        May be called again, and late: very old failures are raised as ResultForgotten.
        """

    def wait_all(self, tickets: Sequence[int], timeout_s: float | None = None) -> None:
        """Waits for each in turn; raises the first error met."""

    def done(self, ticket: int) -> bool:
        """Whether it has finished, with or without failure."""

    def cancel(self, ticket: int) -> bool:
        """
        Cancels an operation that has not started; it and what follows it fail with CancelledError.
        """

    def promote(self, ticket: int) -> None:
        """Makes it, and what it waits for, as urgent as a demanded one."""

    def event_fd(self) -> int:
        """
        Readable when a ticket given to notify() has finished. Belongs to the engine.
        """

    def notify(self, ticket: int) -> None: ...
    def drain_notified(self) -> list[int]:
        """The tickets given to notify() that have finished since the last call."""

    def stats(self) -> dict[str, Any]:
        """
        Bytes, operations and seconds of service by kind since the start; what waits and runs now.
        """

    @property
    def backend(self) -> str:
        """``uring``, ``threads`` or ``pmem``."""

    @property
    def backend_reason(self) -> str:
        """Why AUTO fell back; empty when it did not."""

    @property
    def poisoned(self) -> str | None:
        """The error of the first write or sync that failed."""

    def record_spans(self, capacity: int) -> None:
        """
        From now on remembers when the last ``capacity`` operations ran (0: none of them).
        """

    def drain_spans(self) -> tuple[list[tuple[Activity, bool, int, int, int, int]], int]:
        """
        (activity, held, ticket, start_ns, end_ns, nbytes) of what ended since the last call, in order of ending,
        and how many more were overwritten before it. ``held``: the turn on a limited link, not the operation itself.
        """

    def log_mark(self, text: str) -> None:
        """A mark in the event log; nothing without ``log_path``."""

    def close(self) -> None:
        """
        Lets what is running finish, fails the rest with EngineClosed, joins the threads.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *args: object) -> None: ...

class Clock(enum.Enum):
    REQUEST = 0

    STEP = 1

class Candidates:
    """
    What a policy may know of entries while it chooses; ValueError once select() has returned.
    """

    def evictable(self, entry: int) -> bool: ...
    def frames(self, entry: int) -> int: ...

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
    """
    The order in which an access that does not fit at once is cut into groups. KEY does not depend on what is
    resident: for ranks that must work on the same experts in the same order. GIVEN: that of the access.
    """

    RESIDENT_FIRST = 0

    KEY = 1

    GIVEN = 2

class StepClock(enum.Enum):
    """
    What a step is to policies: what ``end_step`` ends, or, until the first one, each access (but those of the phases
    INIT and OPTIMIZER, and with LATE_ACCESSES the first of them, as many as there are records).
    """

    STEPS = 0

    ACCESSES = 1

    LATE_ACCESSES = 2

def policy_names() -> list[str]:
    """The names that a cache policy may have."""

def check_policy(name: str, options: Mapping[str, float | str] = {}) -> None:
    """
    ValueError if there is no such policy or option, or a value is out of range.
    """

def policy_headroom_frames(name: str, options: Mapping[str, float | str] = {}) -> int:
    """Frames of its capacity that a policy leaves empty."""

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
    def remember(self) -> bool: ...
    @property
    def half_life(self) -> float: ...

def lfu_decay_options(options: Mapping[str, float | str] = {}) -> LfuDecayOptions:
    """What 'lfu-decay' makes of its options, defaults included."""

def half_life(beta: float, interval: float) -> float:
    """
    After how many steps (requests, for the paper variant) LFU-decay counts a hit half.
    """

def beta_for_half_life(half_life: float, interval: float) -> float:
    """
    The beta that gives this half-life when counts decay every `interval` steps.
    """

class HitCounts:
    """Hits: needed and resident when requested. Misses: needed and read."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __repr__(self) -> str: ...

class ResidencyStats:
    """
    Counts since the core was made. ``read_bytes`` has prefetched bytes too.
    """

    @property
    def accesses(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def creates(self) -> int: ...
    @property
    def evictions(self) -> int: ...
    @property
    def write_backs(self) -> int: ...
    @property
    def drops(self) -> int: ...
    @property
    def starved(self) -> int: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def prefetch_reads(self) -> int: ...
    @property
    def prefetch_read_bytes(self) -> int: ...
    @property
    def useful_prefetch_bytes(self) -> int: ...
    @property
    def wasted_prefetch_bytes(self) -> int: ...
    @property
    def by_group(self) -> dict[str, HitCounts]: ...
    @property
    def by_layer(self) -> list[HitCounts]: ...
    def __eq__(self, other: object) -> bool: ...
    def __repr__(self) -> str: ...

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

class ResidencyObserver:
    """Receives the calls of a residency core."""

class EventBuffer(ResidencyObserver):
    """
    Buffers events as columns and gives them to ``sink`` when there are ``rows`` of them.

    The columns: kinds, phases, layers, at, steps, offsets, records, flags. What the sink raises refuses the call that
    follows, with nothing changed.
    """

    def __init__(self, rows: int, sink: Callable[..., object]) -> None: ...
    def flush(self) -> None:
        """Gives the sink what is buffered."""

    def records(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint64], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint16], dict(shape=(None,))],
    ]:
        """
        Of all records: layers, frames [3 each], bytes [3 each], masks of groups stored when they were added.
        """

    @property
    def late_records(self) -> int:
        """How many of them were added after the first other event."""

class Residency:
    """
    What is in the budget: every decision of the host cache (native/cache/residency.hpp).
    """

    def __init__(
        self,
        capacity_frames: int,
        *,
        policy: str = "lfu-decay",
        policy_options: Mapping[str, float | str] = {},
        scope: Scope = Scope.GLOBAL,
        lookahead_frames: int = 0,
        layer_quotas: Sequence[int] = [],
        group_order: GroupOrder = GroupOrder.RESIDENT_FIRST,
        clock: StepClock = StepClock.STEPS,
        parts: int = 1,
    ) -> None: ...
    def observe(self, observer: ResidencyObserver | None) -> None:
        """
        From now on ``observer`` receives the core's calls; None: no observer. Call it before there are records.
        """

    def start_at(self, step: int) -> None:
        """Numbers the steps from ``step`` on. Call it first."""

    def add_record(
        self, layer: int, group_frames: Sequence[int], group_bytes: Sequence[int], stored_mask: int
    ) -> int: ...
    def add_records(
        self,
        layers: Annotated[
            NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        group_frames: Sequence[int],
        group_bytes: Sequence[int],
        stored_mask: int,
    ) -> int:
        """
        ``add_record`` for a record of each of ``layers``, alike otherwise; returns the first one's number.
        """

    def set_stored(self, record: int, mask: int) -> None: ...
    def begin_access(
        self,
        phase: int,
        layer: int,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> tuple[int, Annotated[NDArray[numpy.uint32], dict(shape=(None,))]]: ...
    def next_group(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        tuple[
            Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
            Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        ],
        tuple[
            Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
            Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        ],
    ]: ...
    def end_unit(
        self, unit: int
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
    ]: ...
    def end_group(
        self,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
    ]: ...
    def prefetch(
        self,
        phase: int,
        layer: int,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> tuple[
        int,
        tuple[
            Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
            Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
        ],
    ]: ...
    def cancel_prefetch(self) -> None: ...
    def pin(
        self,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def unpin(
        self,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
    ]: ...
    def keep(
        self,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Keep the resident ones of ``records`` (ascending), in this order, while a frame is left for others: each is pinned until it is released. Returns 1 for each that is kept.
        """

    def release(
        self,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None:
        """Release those of ``records`` that are kept."""

    def clean(
        self,
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ]
        | None = None,
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
    ]: ...
    def drop(
        self,
        entries: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> tuple[
        Annotated[NDArray[numpy.uint8], dict(shape=(None,))],
        Annotated[NDArray[numpy.uint32], dict(shape=(None,))],
    ]: ...
    def end_step(self) -> None: ...
    def stats(self) -> ResidencyStats: ...
    def state(self, entry: int) -> EntryState: ...
    def resident_entries(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    def dirty_entries(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...
    @property
    def used_frames(self) -> int: ...
    @property
    def policy_failed(self) -> bool: ...
    @property
    def clock(self) -> StepClock:
        """What a step is now."""

    @property
    def recorded_clock(self) -> StepClock:
        """STEPS, unless accesses have been steps."""

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
    def parts(self) -> int: ...
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
        late_layers: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        late_frames: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        late_bytes: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        late_stored: Annotated[
            NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
    ) -> None: ...
    def run(
        self,
        kinds: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        phases: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)],
        at: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
        layers: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        offsets: Annotated[
            NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        records: Annotated[
            NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
        ],
        flags: Annotated[NDArray[numpy.uint16], dict(shape=(None,), order="C", device="cpu", writable=False)],
    ) -> None: ...
    def finish(self) -> None: ...

class Contract(enum.Enum):
    """
    How an event's entries are requested: as one set none of which evicts another, or one after
    another.
    """

    ATOMIC = 0

    SEQUENTIAL = 1

class Detail(enum.Enum):
    """
    What is counted beside the totals: by step and layer, or by event as well.
    """

    STEPS = 0

    EVENTS = 1

class Oversized(enum.Enum):
    """
    What is done with an entry that the cache cannot hold: CapacityError, or a miss that is not admitted.
    """

    REFUSE = 0

    BYPASS = 1

def bound_names() -> list[str]:
    """
    What knows the future, which simulate() takes in the place of a policy.
    """

def simulate(
    offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    entries: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    writes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    layers: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    phases: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    steps: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    sizes: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    entry_layers: Annotated[
        NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)
    ]
    | None = None,
    records: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    groups: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    bytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    pinned: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    requesters: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    *,
    policy: str,
    options: Mapping[str, float | str] = {},
    capacity_frames: int,
    scope: Scope = Scope.GLOBAL,
    layer_quotas: Sequence[int] = [],
    contract: Contract = Contract.ATOMIC,
    warmup_events: int = 0,
    detail: Detail = Detail.STEPS,
    group_order: GroupOrder = GroupOrder.RESIDENT_FIRST,
    oversized: Oversized = Oversized.REFUSE,
) -> SimulationResult:
    """
    A policy (or one that knows the future: Belady 1966) over columns: event i asks for ``entries[offsets[i]:offsets[i + 1]]``.

    ``writes`` and ``requesters`` (which sequences ask, a bit each) are by request; ``layers``, ``phases`` and ``steps`` (non-decreasing) are by event; ``sizes``
    (frames; 1 each), ``entry_layers``, ``records`` (which entries are of one record; each of its own), ``groups``
    (which of its record's an entry is; its place among neighbours), ``bytes`` (1 a frame) and ``pinned`` (never
    leaves once resident) are by entry, entries being numbered from 0. Counts exactly what a Residency of this
    policy counts. The first ``warmup_events`` are carried out and not counted. ValueError, naming the column, for
    what does not fit together; CapacityError when what must be resident at once does not, unless ``oversized`` lets it
    pass: ``not_admitted`` of the misses.
    """

def stack_distances(
    offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order="C", device="cpu", writable=False)],
    entries: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order="C", device="cpu", writable=False)],
    writes: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order="C", device="cpu", writable=False)]
    | None = None,
    *,
    contract: Contract = Contract.ATOMIC,
    warmup_events: int = 0,
) -> StackDistances:
    """
    LRU at every capacity in one pass over columns as of ``simulate``, entries of one size, one cache for all
    (Mattson et al. 1970).
    """
