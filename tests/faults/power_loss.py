"""Every state of the disk that a power cut could leave, from all that was ever asked of a file system.

The log is the fault file system's: writes, syncs, names, of every file, the index included. The model is POSIX at
its harshest, more than ext4 allows itself:

- A change of a file's content (write, fallocate, truncate, punched hole) that had ended before a sync of that file
  began, which itself ended before the cut, is there. Any other that had begun may be there, or not, whatever came
  before or after it; of a write each 512-byte sector may be there or not on its own.
- Changes of one place that were under way at once took effect in any order.
- A change of a name (create, mkdir, rename, unlink) is there once its directory was synced. Any other may be there
  or not, each on its own: that a file was synced says nothing of its name.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

SECTOR = 512
PUNCH = 2  # FALLOC_FL_PUNCH_HOLE
KEEP_SIZE = 1
Event = tuple[str, int, str, str, int, bytes]
CONTENT = {"write", "fallocate", "truncate"}
NAMES = {"create", "mkdir", "rename", "unlink"}
_NO_NAME = -1  # what was unlinked: no cut finds it again


class Kind(Enum):
    """What of the changes in the air has landed, at a cut."""

    PREFIX = "all that was asked for"
    SYNCED = "nothing but what was synced"
    SOME = "some, in any combination"
    ALL_BUT_ONE = "all but one"
    ONLY_ONE = "only one"
    TORN = "sectors of writes, in any combination"


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
    #: Another change of the same place was under way at once.
    racing: bool = False
    began: int = 0  # in the log
    until: float = float("inf")

    @property
    def span(self) -> tuple[int, float]:
        """The bytes whose content depends on when it takes effect."""
        if self.op == "write":
            return self.offset, self.offset + len(self.content)
        if self.op == "truncate":
            return self.offset, float("inf")
        length, mode = map(int, self.content.split())
        return self.offset, self.offset + (length if mode & PUNCH else 0)

    def meets(self, other: Change) -> bool:
        (begin, end), (first, last) = self.span, other.span
        return begin < last and first < end


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
    kind: Kind
    directories: list[str] = field(default_factory=list)
    files: dict[str, Content] = field(default_factory=dict)

    def digest(self) -> bytes:
        """The same for states in which every name and byte is."""
        hashed = hashlib.sha1("\0".join(self.directories).encode(), usedforsecurity=False)
        for name, content in sorted(self.files.items()):
            data = content.data.rstrip(b"\0")
            hashed.update(f"\0{name}\0{content.size}\0{len(data)}\0".encode())
            hashed.update(data)
        return hashed.digest()

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
    """Follows a log that began at ``start`` (nothing), and draws states of the disk at any moment of it."""

    def __init__(self, start: CrashState | None = None) -> None:
        self.changes: dict[int, Change] = {}
        self.syncs: dict[int, list[Change]] = {}
        self.inodes: dict[str, int] = {}
        self._directories: list[str] = [] if start is None else start.directories
        self._settled: dict[int, Content] = {}
        self._events = 0
        for number, (path, content) in enumerate(sorted(start.files.items()) if start else ()):
            self.inodes[path] = _NO_NAME - 1 - number
            self._settled[self.inodes[path]] = content.copy()
        self._names = dict(self.inodes)

    def follow(self, event: Event) -> None:
        kind, number, op, path, offset, content = event
        self._events += 1
        if kind == "end":
            if number in self.syncs:
                for change in self.syncs.pop(number):
                    change.durable = True
            elif number in self.changes:
                self.changes[number].ended, self.changes[number].until = True, self._events
        elif op == "fsync":
            inode = self.inodes.get(path, _NO_NAME)
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
            inode = self.inodes.get(path, _NO_NAME)
            if op == "rename":
                self.inodes[content.decode()] = self.inodes.pop(path)
            change = Change(number, op, path, offset, content, inode, began=self._events)
            self._notice_races(change)
            self.changes[number] = change

    def _notice_races(self, change: Change) -> None:
        for other in self.changes.values() if change.op in CONTENT else ():
            same = other.op in CONTENT and other.inode == change.inode
            if same and not other.ended and change.meets(other):
                change.racing = other.racing = True

    def settle(self) -> None:
        """Folds what no cut can lose any more into a base: the first changes of each file, all durable."""
        open_inodes: set[int] = set()
        for number, change in list(self.changes.items()):
            if change.op not in CONTENT or change.inode in open_inodes:
                continue
            if not change.durable or change.racing:
                open_inodes.add(change.inode)
                continue
            _apply(self._settled.setdefault(change.inode, Content()), change, None, 0.0)
            del self.changes[number]

    def state(self, cut: int, kind: Kind, rng: random.Random) -> CrashState:
        """One legal state now. How much of what is in the air has landed is drawn anew each time."""
        there, torn = self._draw(kind, rng)
        contents = {inode: base.copy() for inode, base in self._settled.items()}
        names = dict(self._names)
        directories = set(self._directories)
        for change in self._in_order(rng):
            if change.op in NAMES:
                if there(change):
                    _rename(names, directories, change)
            elif torn and change.op == "write" and not change.durable:
                _apply(contents.setdefault(change.inode, Content()), change, rng, torn)
            elif there(change):
                _apply(contents.setdefault(change.inode, Content()), change, None, 0.0)
        state = CrashState(cut, kind)
        state.directories = sorted(d for d in directories if _reachable(d, directories))
        for name, inode in names.items():
            if _reachable(name, directories):
                state.files[name] = contents.get(inode, Content())
        return state

    def _draw(self, kind: Kind, rng: random.Random) -> tuple[Callable[[Change], bool], float]:
        """Whether a change has landed whole, and the chance of a sector of one that may be torn (0: none is)."""
        landed = rng.random()
        chance = {Kind.PREFIX: 1.0, Kind.ALL_BUT_ONE: 1.0, Kind.SYNCED: 0.0, Kind.ONLY_ONE: 0.0}.get(
            kind, landed
        )
        odd = None
        if kind in (Kind.ALL_BUT_ONE, Kind.ONLY_ONE):
            odd = rng.choice([c.number for c in self.changes.values() if not c.durable] or [0])

        def there(change: Change) -> bool:
            lands = rng.random() < chance
            return change.durable or (not lands if change.number == odd else lands)

        return there, landed if kind is Kind.TORN else 0.0

    def _in_order(self, rng: random.Random) -> Iterable[Change]:
        """The changes in an order in which they may have taken effect: each between its beginning and its end."""
        if not any(change.racing for change in self.changes.values()):
            return self.changes.values()
        moments = {
            c.number: rng.uniform(c.began, min(c.until, self._events + 1)) if c.racing else c.began
            for c in self.changes.values()
        }
        return sorted(self.changes.values(), key=lambda change: moments[change.number])


def _parents(change: Change) -> set[str]:
    names = [change.path] + ([change.content.decode()] if change.op == "rename" else [])
    return {str(PurePosixPath(name).parent) for name in names}


def _reachable(name: str, directories: set[str]) -> bool:
    return directories.issuperset(_above(name))


@functools.cache
def _above(name: str) -> frozenset[str]:
    return frozenset(str(parent) for parent in PurePosixPath(name).parents) - {"."}


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


_OTHERS = (Kind.SOME, Kind.ALL_BUT_ONE, Kind.TORN, Kind.ONLY_ONE)
_ATTEMPTS = 4


def crash_states(
    log: list[Event],
    count: int,
    *,
    seed: int = 0,
    first: int = 0,
    start: CrashState | None = None,
    promise: Callable[[int], Hashable] = lambda cut: 0,
) -> Iterator[CrashState]:
    """``count`` states, spread evenly over every cut of ``log`` from event ``first`` on; no two are the same. Fewer
    where there are no more to be found.

    The same bytes are another state where ``promise`` (of a cut: what must be found after it) is another.
    """
    rng, seen = random.Random(seed), set[tuple[bytes, Hashable]]()
    before = -1
    while before < len(seen) < count:
        before = len(seen)
        for cut, kind, disk in _draws(log, count - before, first, start, lambda: len(seen)):
            state = disk.state(cut, kind, rng)
            key = state.digest(), promise(cut)
            if key not in seen:
                seen.add(key)
                yield state


def _draws(
    log: list[Event], count: int, first: int, start: CrashState | None, drawn: Callable[[], int]
) -> Iterator[tuple[int, Kind, Disk]]:
    """Where, and of which kind, states are to be drawn for ``drawn`` to grow by ``count``. What turns out to repeat
    what was drawn before is made up for a little later.
    """
    disk, others, base = Disk(start), itertools.cycle(_OTHERS), drawn()
    cuts = len(log) - first
    for cut, event in enumerate(log, 1):
        disk.follow(event)
        disk.settle()
        if cut <= first:
            continue
        wanted = max(base + -(-count * (cut - first) // cuts), drawn())
        attempts = itertools.chain(_new_at(event), itertools.islice(others, _ATTEMPTS * (wanted - drawn())))
        while drawn() < wanted and (kind := next(attempts, None)):
            yield cut, kind, disk


def _new_at(event: Event) -> tuple[Kind, ...]:
    """Of the two kinds that chance has no part in, the one that is not what it was a moment ago."""
    sync = event[2].startswith("fsync")
    if event[0] == "begin":
        return () if sync else (Kind.PREFIX,)
    return (Kind.SYNCED,) if sync else ()


def empty(root: Path) -> None:
    """Removes everything below ``root``: few files, and often."""
    for child in os.scandir(root):
        if child.is_dir():
            empty(Path(child.path))
            os.rmdir(child.path)
        else:
            os.unlink(child.path)
