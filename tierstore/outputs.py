"""What commands write: results in the types of JSON, and files: what each may replace, and how.

An output replaces an earlier output of its own kind or an empty file, and nothing else: no source, store or model. It is
written to a temporary file beside its target and renamed when complete. A symbolic link is followed. A pipe, a device or
an open descriptor (``/dev/stdout``) is written directly, or refused if the format needs a seekable file.
"""

from __future__ import annotations

import dataclasses
import errno
import io
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

_HEAD_BYTES = 1 << 16
#: The file that marks a store (``tierstore.store.disk.home``): an empty file in a store may be its lock.
_STORE = "tierstore.json"
_DESCRIPTOR = re.compile(r"/(?:proc/(?:self|\d+)|dev)/fd/(\d+)")


class OutputKind(Enum):
    """What an output holds: its name in errors, and a regular expression for the beginning of such a file."""

    TRACE = "a trace", rb"tsrtrace"
    TIMELINE = "a timeline", rb'\[\s*(\{"ph"|\])'
    METRICS = "metrics of a run", rb'\{"step": '
    PAGE = "an HTML page", rb"(?i)\s*<(!doctype )?html"
    PICTURE = "an SVG picture", rb"(?s)\s*(<\?xml.*)?<svg"
    DOCUMENT = "a benchmark's document", rb'\{\s*"format": "tierstore-bench"'
    PROFILE = "a machine profile", rb'\{\s*"profile_version"'
    IO_PROFILE = "an I/O profile", rb'\{\s*"format": "tierstore-io-profile"'
    TABLES = "tables of a study", rb"All miss ratios and bytes are simulated"
    CONFIGURATION = "a tuned configuration", rb"# for a cache of "
    NAMES = "names of records, none twice", rb"([^\s,{\0]+\n)+([^\s,{\0]+)?\Z"

    def begins(self, head: bytes) -> bool:
        """Whether such a file can begin with ``head``."""
        lines = head.splitlines() if self is OutputKind.NAMES else []
        return re.match(self.value[1], head) is not None and len(set(lines)) == len(lines)


def check_output(
    path: str | os.PathLike[str], kind: OutputKind, *, sources: Iterable[str | os.PathLike[str]] = ()
) -> Path:
    """The regular file that ``path`` resolves to, or ``path`` itself if it is written directly.

    Raises ConfigError if it may not be written: it is one of ``sources`` by any name, holds something other than
    ``kind``, cannot seek, or its directory is missing or not writable. Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ConfigError(f"{path}: expected a file, found a directory")
    if _is_direct(path):
        if kind is OutputKind.TRACE:
            raise ConfigError(f"{path}: {kind.value[0]} needs a regular file, not a pipe or a device")
        return Path(path)
    if not target.parent.is_dir():
        raise ConfigError(f"there is no directory {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {target.parent} is not writable")
    refuse_same(target, sources)
    if not target.exists():
        return target
    with target.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    in_store = any((folder / _STORE).exists() for folder in target.parents)
    if not kind.begins(head) if head else in_store:
        raise ConfigError(f"{path}: this file is not {kind.value[0]} and is not overwritten")
    return target


def refuse_same(path: str | os.PathLike[str], others: Iterable[str | os.PathLike[str]]) -> None:
    """Raise ConfigError if ``path`` is one of ``others``, by any name."""
    for other in others:
        if os.path.realpath(other) == os.path.realpath(path) or (
            os.path.exists(other) and os.path.exists(path) and os.path.samefile(other, path)
        ):
            raise ConfigError(f"{path}: the same file as {other}, which would be lost")


def _is_direct(path: str | os.PathLike[str]) -> bool:
    return os.path.exists(path) and (not os.path.isfile(path) or _descriptor(path) is not None)


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The open descriptor that ``path`` names, as ``/dev/stdout`` does."""
    name = os.fspath(path)
    for _ in range(40):  # as many links as the kernel follows
        if match := _DESCRIPTOR.fullmatch(name):
            return int(match[1])
        if not os.path.islink(name):
            break
        name = os.path.join(os.path.dirname(name), os.readlink(name))
    return None


class _NamedFile(io.FileIO):
    """A file whose write errors name the output that it becomes."""

    def __init__(self, fd: int, path: str | os.PathLike[str]) -> None:
        super().__init__(fd, "wb")
        self._path = os.fspath(path)

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from error


@contextmanager
def replacing(
    path: str | os.PathLike[str], kind: OutputKind, *, sources: Iterable[str | os.PathLike[str]] = ()
) -> Iterator[BinaryIO]:
    """Yield a file to write; it is at ``path`` when the block ends. If the block raises, ``path`` stays as it was.
    Raises as ``check_output`` does, and OSError naming ``path``.
    """
    target = check_output(path, kind, sources=sources)
    if _is_direct(path):
        number = _descriptor(path)
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if number is None else os.dup(number)
        with io.BufferedWriter(_NamedFile(fd, path)) as file:
            yield file
        return
    partial = target.with_name(f"{target.name[:50]}.{secrets.token_hex(4)}.partial")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with io.BufferedWriter(_NamedFile(fd, path)) as file:
            yield file
            file.flush()
            os.fsync(fd)
        try:
            partial.replace(target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            shutil.copyfile(partial, target)  # a file that is a mount point, as in containers
    finally:
        partial.unlink(missing_ok=True)


def write_output(path: str | os.PathLike[str], kind: OutputKind, text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all. Raises as ``replacing`` does."""
    with replacing(path, kind) as file:
        file.write(text.encode(errors="surrogateescape"))


def to_json(value: object) -> object:
    """``value`` in the types of JSON.

    A dataclass becomes the result of its ``as_json``, or its fields by name; an enum its value, a path its text. Numbers
    that are not finite, such as a diverged loss, become None.
    """
    if hasattr(value, "as_json"):
        return to_json(value.as_json())
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(inner) for inner in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
