"""Checks the pages of an LMDB file before LMDB sees them.

LMDB trusts its file: a damaged page can end the process, or send it round in circles. So every page that the last
transaction can reach is read with ``pread`` (where a drive's error is an OSError and not a SIGBUS) and must be
what it should be: in range, met once, its nodes within it, every tree as deep and as full as its head says, and
every other page in the list of free pages, so that the next transaction cannot overwrite one in use.

What is here is the format of LMDB 0.9 on 64-bit machines (``MDB_DATA_VERSION`` 1), as ``mdb.c`` describes it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from tierstore.errors import StoreFormatError

_PAGE = 4096
_READ_BYTES = 1 << 20
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG, _SUBTREE = 1, 2
_NO_PAGE = 2**64 - 1
_META = struct.Struct("<16xII16x48s48sQQ")
_TREE = struct.Struct("<IHH5Q")
_HEAD = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")


class _Pages:
    """The file's pages in use, and which of them have been met."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", buffering=0) as file:
            self._content = self._read(file.fileno(), 2 * _PAGE)
            metas = [_META.unpack_from(self._content, page * _PAGE) for page in (0, 1)]
            for number, (magic, version, _, _, _, transaction) in enumerate(metas):
                if (magic, version) != (_MAGIC, _VERSION):
                    raise self.damaged(f"page {number} is no head")
                # Transactions take turns with the two heads, which begin as 0 and 0.
                if transaction % 2 != number and transaction:
                    raise self.damaged(f"head {number} is of transaction {transaction}")
            if abs(metas[0][-1] - metas[1][-1]) > 1:
                raise self.damaged(f"its heads are of transactions {metas[0][-1]} and {metas[1][-1]}")
            _, _, self.free, self.main, last, _ = max(metas, key=lambda meta: int(meta[-1]))
            self.count = int(last) + 1
            size = os.fstat(file.fileno()).st_size
            if size < self.count * _PAGE:
                message = f"it has {size} bytes, and {self.count * _PAGE} are in use"
                raise StoreFormatError(f"{path}: truncated: {message}")
            self._content = self._read(file.fileno(), self.count * _PAGE)
        self.met = {0, 1}

    def damaged(self, what: str) -> StoreFormatError:
        return StoreFormatError(f"{self.path}: not an index, or damaged: {what}")

    def _read(self, fd: int, nbytes: int) -> bytearray:
        content = bytearray(nbytes)
        view, done = memoryview(content), 0
        while done < nbytes:
            try:
                got = os.preadv(fd, [view[done : done + _READ_BYTES]], done)
            except OSError as error:
                message = f"reading the index: {os.strerror(error.errno or 0)}"
                raise OSError(error.errno, message, str(self.path)) from error
            if not got:
                raise StoreFormatError(f"{self.path}: truncated: not an index, it ends at byte {done}")
            done += got
        return content

    def _meet(self, number: int) -> int:
        if not 1 < number < self.count or number in self.met:
            raise self.damaged(f"page {number} is out of place")
        self.met.add(number)
        return number * _PAGE

    def tree(self, raw: bytes, leaves: bool) -> Iterator[tuple[int, bytes, bytes]]:
        """Flags, key and content of each entry of the tree that ``raw`` is the head of."""
        _, _, depth, _, _, _, entries, root = _TREE.unpack(raw)
        found = 0
        if root != _NO_PAGE:
            for node in self._walk(root, depth):
                found += 1
                if leaves or node[0] & _SUBTREE:
                    yield node
        if found != entries or (root == _NO_PAGE) != (depth == 0):
            raise self.damaged(f"a tree has {found} entries, not {entries}")

    def _walk(self, number: int, depth: int) -> Iterator[tuple[int, bytes, bytes]]:
        start = self._meet(number)
        own, _, kind, lower, upper = _HEAD.unpack_from(self._content, start)
        count = (lower - _HEAD.size) // 2
        expected = _LEAF if depth == 1 else _BRANCH
        if own != number or kind != expected or not _HEAD.size < lower <= upper <= _PAGE or lower % 2:
            raise self.damaged(f"page {number} is not as its tree says")
        for offset in struct.unpack_from(f"<{count}H", self._content, start + _HEAD.size):
            if not upper <= offset <= _PAGE - _NODE.size or offset % 2:
                raise self.damaged(f"page {number} has a node at byte {offset}")
            low, high, flags, key_bytes = _NODE.unpack_from(self._content, start + offset)
            begin = offset + _NODE.size + key_bytes
            nbytes = low | high << 16
            if begin + (0 if kind == _BRANCH else 8 if flags & _BIG else nbytes) > _PAGE:
                raise self.damaged(f"page {number} has a node that ends outside of it")
            key = bytes(self._content[start + begin - key_bytes : start + begin])
            if kind == _BRANCH:
                yield from self._walk(nbytes | flags << 32, depth - 1)
            elif flags & _BIG:
                (first,) = struct.unpack_from("<Q", self._content, start + begin)
                yield flags, key, self._overflow(first, nbytes)
            else:
                yield flags, key, bytes(self._content[start + begin : start + begin + nbytes])

    def _overflow(self, first: int, nbytes: int) -> bytes:
        start = self._meet(first)
        own, _, kind, low, high = _HEAD.unpack_from(self._content, start)
        pages = low | high << 16
        if own != first or kind != _OVERFLOW or pages != -(-(nbytes + _HEAD.size) // _PAGE):
            raise self.damaged(f"page {first} is not as its tree says")
        for number in range(first + 1, first + pages):
            self._meet(number)
        return bytes(self._content[start + _HEAD.size : start + _HEAD.size + nbytes])

    def free_list(self, content: bytes) -> None:
        """One entry of the list of free pages: how many, and their numbers."""
        if len(content) < 8 or len(content) % 8:
            raise self.damaged("the list of free pages")
        count, *numbers = struct.unpack(f"<{len(content) // 8}Q", content)
        if count > len(numbers):
            raise self.damaged("the list of free pages")
        for number in numbers[:count]:
            self._meet(number)


def check_pages(path: Path) -> None:
    """Raises StoreFormatError for an LMDB file that is damaged, OSError where it cannot be read."""
    pages = _Pages(path)
    for _, _, head in pages.tree(pages.main, leaves=False):
        if len(head) != _TREE.size:
            raise pages.damaged("a tree without a head")
        for _ in pages.tree(head, leaves=True):
            pass
    for _, _, content in pages.tree(pages.free, leaves=True):
        pages.free_list(content)
    lost = pages.count - len(pages.met)
    if lost:
        raise pages.damaged(f"{lost} pages are neither free nor in use")
