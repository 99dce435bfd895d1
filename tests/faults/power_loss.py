"""Every state of the disk that a power cut could leave, from all that was ever asked of a file system.

The log is the fault file system's: writes, syncs, names, of every file, the index included. The model is POSIX at
its harshest, more than ext4 allows itself:

- A change of a file's content (write, fallocate, truncate, punched hole) that had ended before a sync of that file
  began, which itself ended before the cut, is there. Any other that had begun may be there, or not, whatever came
  before or after it; of a write each 512-byte sector may be there or not on its own.
- A change of a name (create, mkdir, rename, unlink) is there once its directory was synced. Any other may be there
  or not, each on its own: that a file was synced says nothing of its name.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SECTOR = 512
PUNCH = 2  # FALLOC_FL_PUNCH_HOLE
KEEP_SIZE = 1
Event = tuple[str, int, str, str, int, bytes]
CONTENT = {"write", "fallocate", "truncate"}
NAMES = {"create", "mkdir", "rename", "unlink"}


@dataclass
class Change:
    """One operation that a cut may lose. ``inode`` is what it changes, or what its name stands for."""

    number: int
    op: str
    path: str
    offset: int
    content: bytes
    inode: int
    ended: bool = False
    durable: bool = False


@dataclass
class Content:
    """A file: ``size`` bytes, of which those past ``data`` are zero. (Most of an index is.)"""

    data: bytearray = field(default_factory=bytearray)
    size: int = 0

    def copy(self) -> Content:
        return Content(bytearray(self.data), self.size)

    def write(self, at: int, piece: bytes) -> None:
        self.data.extend(bytes(max(at - len(self.data), 0)))
        self.data[at : at + len(piece)] = piece
        self.size = max(self.size, at + len(piece))

    def read(self, at: int, nbytes: int) -> bytes:
        return bytes(self.data[at : at + nbytes]).ljust(nbytes, b"\0")

    def cut(self, size: int) -> None:
        del self.data[size:]
        self.size = size


@dataclass
class CrashState:
    """What is there after the cut: directories, and files with their content."""

    cut: int
    directories: list[str] = field(default_factory=list)
    files: dict[str, Content] = field(default_factory=dict)

    def write(self, root: Path) -> None:
        """Makes ``root``, an empty directory, this state."""
        for directory in self.directories:
            (root / directory).mkdir()
        for name, content in self.files.items():
            with open(root / name, "wb") as file:
                file.write(content.data)
                file.truncate(content.size)


def without(log: Iterable[Event], op: str, path: str = "") -> list[Event]:
    """The log of a build that never syncs so: ``fsync`` or ``fsyncdir``, of names that end with ``path``."""
    return [event for event in log if event[2] != op or not event[3].endswith(path)]


class Disk:
    """Follows a log, and draws states of the disk at any moment of it."""

    def __init__(self) -> None:
        self.changes: dict[int, Change] = {}
        self.syncs: dict[int, list[Change]] = {}
        self.inodes: dict[str, int] = {}
        self._settled: dict[int, Content] = {}

    def follow(self, event: Event) -> None:
        kind, number, op, path, offset, content = event
        if kind == "end":
            if number in self.syncs:
                for change in self.syncs.pop(number):
                    change.durable = True
            elif number in self.changes:
                self.changes[number].ended = True
        elif op == "fsync":
            inode = self.inodes.get(path, -1)
            self.syncs[number] = [
                c for c in self.changes.values() if c.ended and c.op in CONTENT and c.inode == inode
            ]
        elif op == "fsyncdir":
            self.syncs[number] = [
                c for c in self.changes.values() if c.ended and c.op in NAMES and path in _parents(c)
            ]
        else:
            if op in ("create", "mkdir"):
                self.inodes[path] = number
            inode = self.inodes.get(path, -1)
            if op == "rename":
                self.inodes[content.decode()] = self.inodes.pop(path)
            self.changes[number] = Change(number, op, path, offset, content, inode)

    def settle(self) -> None:
        """Folds what no cut can lose any more into a base: the first changes of each file, all durable."""
        open_inodes: set[int] = set()
        for number, change in list(self.changes.items()):
            if change.op not in CONTENT or change.inode in open_inodes:
                continue
            if not change.durable:
                open_inodes.add(change.inode)
                continue
            _apply(self._settled.setdefault(change.inode, Content()), change, None, 0.0)
            del self.changes[number]

    def state(self, cut: int, rng: random.Random) -> CrashState:
        """One legal state now. How much of what is in the air has landed is drawn anew each time."""
        landed, torn = rng.random(), rng.random() < 0.5
        contents = {inode: base.copy() for inode, base in self._settled.items()}
        names: dict[str, int] = {}
        directories: set[str] = set()
        for change in self.changes.values():
            whole = change.durable or (not (torn and change.op == "write") and rng.random() < landed)
            if change.op in NAMES:
                if change.durable or rng.random() < landed:
                    _rename(names, directories, change)
            elif whole:
                _apply(contents.setdefault(change.inode, Content()), change, None, 0.0)
            elif torn and change.op == "write":
                _apply(contents.setdefault(change.inode, Content()), change, rng, landed)
        state = CrashState(cut)
        state.directories = sorted(d for d in directories if _reachable(d, directories))
        for name, inode in names.items():
            if _reachable(name, directories):
                state.files[name] = contents.get(inode, Content())
        return state


def _parents(change: Change) -> set[str]:
    names = [change.path] + ([change.content.decode()] if change.op == "rename" else [])
    return {str(PurePosixPath(name).parent) for name in names}


def _reachable(name: str, directories: set[str]) -> bool:
    return all(str(parent) in directories for parent in PurePosixPath(name).parents if str(parent) != ".")


def _rename(names: dict[str, int], directories: set[str], change: Change) -> None:
    if change.op == "create":
        names[change.path] = change.inode
    elif change.op == "mkdir":
        directories.add(change.path)
    elif change.op == "rename":
        names.pop(change.path, None)
        names[change.content.decode()] = change.inode
    else:
        names.pop(change.path, None)
        directories.discard(change.path)


def _apply(content: Content, change: Change, rng: random.Random | None, landed: float) -> None:
    """``change`` done to ``content``; with ``rng``, of its sectors only those that landed."""
    if change.op == "truncate":
        content.cut(change.offset)
        return
    if change.op == "fallocate":
        length, mode = map(int, change.content.split())
        end = change.offset + length
        if mode & PUNCH:
            stop = min(end, len(content.data))
            content.data[change.offset : stop] = bytes(max(stop - change.offset, 0))
        elif not mode & KEEP_SIZE:
            content.size = max(content.size, end)
        return
    at, end = change.offset, change.offset + len(change.content)
    while at < end:
        stop = min(end, at - at % SECTOR + SECTOR) if rng else end
        if rng is None or rng.random() < landed:
            content.write(at, change.content[at - change.offset : stop - change.offset])
        at = stop


def crash_states(log: list[Event], count: int, seed: int, first: int = 0) -> Iterator[CrashState]:
    """About ``count`` states, spread evenly over every cut of ``log`` from event ``first`` on."""
    rng, disk, drawn = random.Random(seed), Disk(), 0
    cuts = len(log) - first
    for cut, event in enumerate(log, 1):
        disk.follow(event)
        disk.settle()
        if cut <= first:
            continue
        while drawn * cuts < count * (cut - first):
            drawn += 1
            yield disk.state(cut, rng)


def empty(root: Path) -> None:
    """Removes everything below ``root``: few files, and often."""
    for child in os.scandir(root):
        if child.is_dir():
            empty(Path(child.path))
            os.rmdir(child.path)
        else:
            os.unlink(child.path)
