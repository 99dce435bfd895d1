"""The log that an engine keeps, and what it says to ``power_loss``: changes of files, and which commit a cut must leave.

The index is no part of it: it is the image of the last acknowledged commit or, from the moment that its transaction may
begin, that of the next. LMDB's transactions are taken as atomic and durable.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import power_loss

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


def as_change(entry: Entry, root: Path) -> power_loss.Event:
    """The event of a file system over ``root``; of a mark, one that nothing follows from."""
    if entry.event is Event.MARK:
        return ("end", 0, "", "", 0, b"")
    kind, op = {
        Event.WRITE_SUBMIT: ("begin", "write"),
        Event.SYNC_SUBMIT: ("begin", "fsync"),
        Event.PUNCH_SUBMIT: ("begin", "fallocate"),
    }.get(entry.event, ("end", ""))
    content = entry.data
    if entry.event is Event.PUNCH_SUBMIT:
        content = b"%d %d" % (*struct.unpack("<Q", content), power_loss.PUNCH | power_loss.KEEP_SIZE)
    path = str(Path(entry.text).relative_to(root)) if kind == "begin" else ""
    return (kind, entry.ticket, op, path, entry.offset, content)


@dataclass(frozen=True)
class Promise:
    """The commits of which one must be found after a cut."""

    acknowledged: int = 0
    transaction: int = 0  # that of the next commit, which may have begun
    undoable: bool = False  # the last durable commit may still be undone

    @property
    def generations(self) -> list[int]:
        return [number for number in (self.acknowledged, self.transaction) if number]

    def after(self, entry: Entry) -> Promise:
        what, _, number = entry.text.partition(" ")
        if entry.event is not Event.MARK:
            return self
        if what == "index":
            return Promise(self.acknowledged, int(number), self.undoable)
        if what == "commit":
            return Promise(int(number), 0, undoable=True)
        return Promise(self.acknowledged, self.transaction, self.undoable and what != "acknowledge")
