"""Every state of the disk that a crash could leave, built from the log of a run.

The model: a write that was done before a sync of its file was submitted, and that sync done before the cut,
is durable. Any other write submitted before the cut may be there, or not, or in part, each 4096-byte page on
its own; pages of two writes to one place land in the order of the writes. A punched hole is a write of zeros of which
nothing is ever known to be durable; one that was not done when a write to the same place was submitted may land
after that write. The index is the image of the last
acknowledged commit or, from the moment that its transaction may begin, that of the next: LMDB's transactions
are taken as atomic and durable.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

PAGE = 4096
HEAD = struct.Struct("<BQQI")


class Event(IntEnum):
    WRITE_SUBMIT = 1
    WRITE_DONE = 2
    SYNC_SUBMIT = 3
    SYNC_DONE = 4
    MARK = 5
    PUNCH_SUBMIT = 6
    PUNCH_DONE = 7


@dataclass(frozen=True)
class Entry:
    event: Event
    ticket: int
    offset: int
    text: str
    data: bytes

    @property
    def pages(self) -> range:
        """What a write or a punch changes."""
        punch = self.event is Event.PUNCH_SUBMIT
        nbytes = struct.unpack("<Q", self.data)[0] if punch else len(self.data)
        return range(self.offset // PAGE, (self.offset + nbytes) // PAGE)

    def page(self, number: int) -> bytes:
        begin = number * PAGE - self.offset
        return bytes(PAGE) if self.event is Event.PUNCH_SUBMIT else self.data[begin : begin + PAGE]


def read_log(path: Path) -> list[Entry]:
    raw, at, entries = path.read_bytes(), 0, []
    while at < len(raw):
        event, ticket, offset, length = HEAD.unpack_from(raw, at)
        at += HEAD.size
        text = raw[at : at + length].decode()
        at += length
        (nbytes,) = struct.unpack_from("<Q", raw, at)
        at += 8
        entries.append(Entry(Event(event), ticket, offset, text, raw[at : at + nbytes]))
        at += nbytes
    return entries


def without_syncs(log: list[Entry], directory: str = "") -> list[Entry]:
    """The log of a build that never calls fdatasync, or only in other directories than one."""
    skipped = {e.ticket for e in log if e.event is Event.SYNC_SUBMIT and e.text.startswith(directory)}
    syncs = (Event.SYNC_SUBMIT, Event.SYNC_DONE)
    return [entry for entry in log if entry.event not in syncs or entry.ticket not in skipped]


@dataclass
class CrashState:
    """``pages``: by path, what is at each page that was ever written. ``generations``: legal index images."""

    cut: int
    acknowledged: int
    generations: list[int]
    unacknowledged: bool  # the last durable commit may still be undone
    pages: dict[str, dict[int, bytes]] = field(default_factory=dict)

    def digest(self) -> bytes:
        """The same for states in which every page is."""
        hashed = hashlib.sha1(usedforsecurity=False)
        for path, pages in sorted(self.pages.items()):
            for number, data in sorted(pages.items()):
                hashed.update(f"\0{path}\0{number}\0".encode())
                hashed.update(data)
        return hashed.digest()


class Disk:
    """Follows the log; at each cut it knows what is durable and what is in the air."""

    def __init__(self, log: list[Entry]) -> None:
        self._log = log
        self.writes: dict[int, Entry] = {}
        self.order: list[int] = []
        self.done: set[int] = set()
        self.durable: set[int] = set()
        self.punching: set[int] = set()
        self.races: dict[int, list[int]] = {}  # writes, and the punches that may land after them
        self.syncs: dict[int, tuple[str, set[int]]] = {}
        self.acknowledged = 0
        self.transaction: int | None = None
        self.unacknowledged = False

    def follow(self, entry: Entry) -> None:
        if entry.event is Event.WRITE_SUBMIT:
            self.writes[entry.ticket] = entry
            self.order.append(entry.ticket)
            racing = [p for p in sorted(self.punching) if self.writes[p].text == entry.text]
            self.races[entry.ticket] = [p for p in racing if set(self.writes[p].pages) & set(entry.pages)]
        elif entry.event is Event.PUNCH_SUBMIT:
            self.writes[entry.ticket] = entry
            self.order.append(entry.ticket)
            self.punching.add(entry.ticket)
        elif entry.event is Event.PUNCH_DONE:
            self.punching.remove(entry.ticket)
        elif entry.event is Event.WRITE_DONE:
            self.done.add(entry.ticket)
        elif entry.event is Event.SYNC_SUBMIT:
            covered = {w for w in self.done if self.writes[w].text == entry.text}
            self.syncs[entry.ticket] = (entry.text, covered)
        elif entry.event is Event.SYNC_DONE:
            self.durable |= self.syncs[entry.ticket][1]
        elif entry.text.startswith("index "):
            self.transaction = int(entry.text.removeprefix("index "))
        elif entry.text.startswith("commit "):
            self.acknowledged, self.transaction = int(entry.text.removeprefix("commit ")), None
            self.unacknowledged = True
        elif entry.text.startswith("acknowledge "):
            self.unacknowledged = False

    def state(self, cut: int, rng: random.Random) -> CrashState:
        """One legal state at this cut. The chance of a page in the air is drawn anew for each state."""
        generations = [self.acknowledged] + ([self.transaction] if self.transaction else [])
        state = CrashState(cut, self.acknowledged, [g for g in generations if g], self.unacknowledged)
        whole, landed = rng.random(), rng.random()
        for ident in self.order:
            write = self.writes[ident]
            pages = state.pages.setdefault(write.text, {})
            fate = rng.random() < landed if rng.random() < whole else None
            for page in write.pages:
                there = rng.random() < landed if fate is None else fate
                if ident in self.durable or there:
                    pages[page] = write.page(page)
            for punch in (self.writes[p] for p in self.races.get(ident, ()) if rng.random() < landed):
                pages.update({page: bytes(PAGE) for page in write.pages if page in punch.pages})
        return state


def crash_states(log: list[Entry], count: int, seed: int) -> Iterator[CrashState]:
    """At least ``count`` states, spread over every prefix of ``log`` that some commit precedes."""
    rng = random.Random(seed)
    disk = Disk(log)
    first = next(at for at, entry in enumerate(log) if entry.text.startswith("index "))
    rounds = -(-count // (len(log) - first))
    for cut, entry in enumerate(log, 1):
        disk.follow(entry)
        for _ in range(rounds if cut > first else 0):
            yield disk.state(cut, rng)
