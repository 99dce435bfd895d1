"""What this machine can do, and what each capability setting resolves to.

A capability is set to OFF, AUTO or ON. AUTO uses it where a probe finds it, and otherwise records why not; ON raises
CapabilityError instead of falling back. A probe tries the operation itself where it can (a ring, a direct write), since a
kernel's version says little about what a container may do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import importlib.util
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from tierstore.errors import CapabilityError

_PROC = Path("/proc")
_SYS = Path("/sys")
_PAGE_BYTES = 4096
_PROBE = ".tierstore-probe-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Errors of a directory in which no file can be created.
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, *_FULL)


class Capability(Enum):
    """A setting: never use it, use it where it works, or use it or fail."""

    OFF = "off"
    AUTO = "auto"
    ON = "on"


@dataclass(frozen=True, slots=True)
class Finding:
    """A probe's answer, or whether a capability is in effect; with the reason in a few words."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def resolve(name: str, setting: Capability, probe: Callable[[], Finding]) -> Finding:
    """Whether the capability ``name`` is used under ``setting``. OFF does not probe. Raises CapabilityError if it is ON and
    the machine lacks the capability.
    """
    if setting is Capability.OFF:
        return Finding(False, "switched off")
    found = probe()
    if not found and setting is Capability.ON:
        raise CapabilityError(f"{name} is set to on, but this machine lacks it: {found.reason}")
    return found


def probe_io_uring(proc: Path = _PROC) -> Finding:
    """Whether this process may use io_uring: the native engine sets up a ring and sends an operation through it."""
    if importlib.util.find_spec("tierstore._native") is None:
        return Finding(False, "the native core is not built")
    from tierstore import _native

    try:
        _native.Engine(backend=_native.IoBackend.URING).close()
    except OSError as error:
        failure = _name_of(error)
        disabled = kernel_text(proc / "sys/kernel/io_uring_disabled")
        if disabled in ("1", "2"):
            return Finding(False, f"{failure}: kernel.io_uring_disabled is {disabled}")
        return Finding(False, f"{failure}: {error.strerror} (old kernel, or a seccomp filter)")
    return Finding(True, "an operation went through a ring")


def probe_direct_io(directory: Path) -> Finding:
    """Whether files in ``directory`` accept O_DIRECT: writes a page to a temporary file.

    Raises OSError, naming the directory, if it does not exist.
    """
    try:
        fd, name = tempfile.mkstemp(prefix=_PROBE, dir=directory)
    except OSError as exc:
        if exc.errno not in _NOT_WRITABLE:
            raise
        return Finding(
            False, f"{_name_of(exc)} from {filesystem_type(directory)}: no file can be created to test it"
        )
    os.close(fd)
    try:
        with mmap.mmap(-1, _PAGE_BYTES) as page:
            direct = os.open(name, os.O_RDWR | os.O_DIRECT)
            try:
                written = os.pwrite(direct, page, 0)
            finally:
                os.close(direct)
        if written != _PAGE_BYTES:
            return Finding(False, f"a direct write of {_PAGE_BYTES} bytes wrote {written}")
    except OSError as exc:
        instead = "the disk is full" if exc.errno in _FULL else "buffered I/O instead"
        return Finding(False, f"{_name_of(exc)} from {filesystem_type(directory)}: {instead}")
    finally:
        os.unlink(name)
    return Finding(True, f"{filesystem_type(directory)} took a direct write")


def probe_fallocate(directory: Path) -> Finding:
    """Whether files in ``directory`` can reserve space, as a store must: reserves a page in a temporary file.

    Raises OSError, naming the directory, if it does not exist.
    """
    if importlib.util.find_spec("tierstore._native") is None:
        return Finding(False, "the native core is not built")
    from tierstore import _native

    kind = filesystem_type(directory)
    try:
        with (
            tempfile.NamedTemporaryFile(prefix=_PROBE, dir=directory) as made,
            _native.File(made.name) as file,
        ):
            file.allocate(0, _PAGE_BYTES)
    except FileNotFoundError:
        raise
    except OSError as error:
        tried = error.errno not in _NOT_WRITABLE
        what = (
            "a store cannot reserve its space here and is refused"
            if tried
            else "no file can be created to test it"
        )
        return Finding(False, f"{_name_of(error)} from {kind}: {what}")
    return Finding(True, f"{kind} reserved a page")


def probe_locks(directory: Path) -> Finding:
    """Whether ``directory`` can be locked (``flock``), and a file in it, if one can be created.

    Raises OSError, naming the directory, if it does not exist.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(prefix=_PROBE, dir=directory) as file:
            refused = _refused(file.fileno())
            if refused:
                return Finding(
                    False, f"{refused} from {filesystem_type(directory)}: no store can be opened there"
                )
        refused = _refused(fd)
    finally:
        os.close(fd)
    if refused:
        return Finding(
            False,
            f"{refused} from {filesystem_type(directory)}: do not remove `lease` while a store is open there",
        )
    return Finding(True, f"{filesystem_type(directory)} locked the directory")


def _refused(fd: int) -> str:
    """The error of a shared ``flock``; empty if it is granted or another process holds the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return ""
    except OSError as exc:
        return _name_of(exc)
    return ""


def _name_of(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def probe_huge_pages(sys: Path = _SYS) -> Finding:
    """Whether transparent huge pages can be requested for memory."""
    text = kernel_text(sys / "kernel/mm/transparent_hugepage/enabled")
    if not text:
        return Finding(False, "the kernel has no transparent huge pages")
    chosen = text.partition("[")[2].partition("]")[0]
    return Finding(chosen in ("always", "madvise"), f"transparent_hugepage is {chosen or text!r}")


@cache
def processor_flags(proc: Path = _PROC) -> frozenset[str]:
    """The instructions that the processor has, as Linux names them; empty on other processors than x86. Read once: the
    kernel makes the text anew for all cores each time.
    """
    for line in kernel_text(proc / "cpuinfo").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def has_amx() -> bool:
    """Whether the processor multiplies matrices in tiles (AMX): oneDNN then compiles and computes bf16 products for them."""
    return "amx_tile" in processor_flags()


def instruction_sets(proc: Path = _PROC) -> list[str]:
    """The optimizer's instruction sets that the processor has, best first; ``scalar`` is always included."""
    flags = processor_flags(proc)
    # The parts of AVX-512 that the kernels use.
    found = ["avx512"] if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags else []
    found += ["avx2"] if "avx2" in flags else []
    return [*found, "scalar"]


def probe_instructions(name: str, proc: Path = _PROC) -> Finding:
    """Whether the processor has the instruction set ``name``, as ``instruction_sets`` names it."""
    found = instruction_sets(proc)
    if name not in found:
        return Finding(False, f"the processor has {', '.join(found)} only")
    return Finding(True, "the processor has it" + ("" if name == chosen_instruction_set() else ", unused"))


def chosen_instruction_set() -> str:
    """The instruction set that the native core uses: the best one, or the one that TIERSTORE_ISA names.

    Where the core is not built: the processor's best, since ``tierstore doctor`` must work then too. Raises
    CapabilityError if TIERSTORE_ISA names an unknown or unsupported one.
    """
    if importlib.util.find_spec("tierstore._native") is None:
        return instruction_sets()[0]
    from tierstore import _native

    try:
        return _native.instruction_set().name.lower()
    except ValueError as exc:
        raise CapabilityError(str(exc)) from exc


def probe_dax(directory: Path, proc: Path = _PROC) -> Finding:
    """Whether ``directory`` is mounted with DAX: loads and stores reach persistent memory without the page cache."""
    mount = _mount_of(directory, proc)
    if mount is None:
        return Finding(False, "its mount is not listed")
    if any(option in ("dax", "dax=always") for option in mount.options):
        return Finding(True, f"{mount.point} is mounted with dax")
    return Finding(False, f"{mount.point} ({mount.type}) is not mounted with dax")


# Mounts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of mountinfo. ``number``: the device's, as ``major:minor``; ``source``: empty if the kernel names none."""

    number: str
    point: Path
    type: str
    source: str
    options: tuple[str, ...]


def mounts(proc: Path = _PROC) -> Iterator[Mount]:
    """Yield the mounts, the latest last."""
    for line in kernel_text(proc / "self/mountinfo").split("\n"):
        # "22 27 0:21 / /proc rw,relatime shared:1 - proc proc rw": any number of fields before the dash.
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) >= 6 and rest:
            source = _unescaped(rest[1]) if len(rest) > 1 else ""
            options = (*fields[5].split(","), *(rest[2].split(",") if len(rest) > 2 else ()))
            yield Mount(fields[2], Path(_unescaped(fields[4])), rest[0], source, options)


def filesystem_type(directory: Path, proc: Path = _PROC) -> str:
    """The name of the file system that ``directory`` is on: ``ext4``; ``unknown`` if it is not listed."""
    mount = _mount_of(directory, proc)
    return "unknown" if mount is None else mount.type


def _mount_of(directory: Path, proc: Path) -> Mount | None:
    resolved = directory.resolve()
    above = [mount for mount in mounts(proc) if resolved.is_relative_to(mount.point)]
    # Of equal matches, the last: a later mount covers an earlier one.
    return max(reversed(above), key=lambda mount: len(mount.point.parts), default=None)


def kernel_text(path: Path) -> str:
    """The stripped text of a kernel file, decoded by ``os.fsdecode``; empty if the kernel has no such file."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""


def _unescaped(name: str) -> str:
    """Decode a name in mountinfo, where blanks and backslashes are three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def require_package(name: str, purpose: str, *, extra: str = "hf") -> Any:
    """Import the module ``name``, which the extra ``extra`` installs. Raises CapabilityError that says how to install it
    for ``purpose``.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise CapabilityError(
            f'{purpose} needs the package {name} ({error}): pip install "tierstore[{extra}]"'
        ) from error


@contextmanager
def package_path(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield ``path`` for packages that accept only UTF-8 (tokenizers, pyarrow): if it is not UTF-8, another name of the
    file, valid within the block.
    """
    name = os.fspath(path)
    if os.fsencode(name).decode(errors="replace") == name:
        yield name
        return
    fd = os.open(name, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)
