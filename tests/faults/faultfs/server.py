"""The process behind the mount: passes everything through to a directory, but for what the rules say.

Arguments: the directory behind, the mount point, ``log`` to keep every change. Lines in (JSON), a line out for
each: ``{"rule": ...}``, ``{"clear": 1}``, ``{"fired": 1}``, ``{"log": FILE}``. It ends with its standard input.
"""

import contextlib
import errno
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from faultfs import protocol as fuse
from faultfs.protocol import Op
from faultfs.rules import Action, Rule, Rules

THREADS = 6
Event = tuple[str, int, str, str, int, bytes]  # begin or end, number, operation, path, offset, content


class Node:
    """An inode behind the mount, held by a descriptor that outlives its names."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @property
    def handle(self) -> str:
        return f"/proc/self/fd/{self.fd}"


class Server:
    def __init__(self, behind: str, target: str, *, keep_log: bool) -> None:
        self.rules = Rules()
        self.behind = os.path.realpath(behind)
        self.nodes = {fuse.ROOT: Node(os.open(behind, os.O_PATH | os.O_CLOEXEC))}
        self.numbers: dict[tuple[int, int], int] = {}
        self.next_node = 2
        self.log: list[Event] | None = [] if keep_log else None
        self.marks = 0
        self.lock = threading.Lock()
        self.fd = fuse.mount(target)
        self.handlers: dict[int, Callable[[int, bytes], bytes]] = {
            Op.LOOKUP: self.lookup,
            Op.GETATTR: lambda node, _: self.attr(node),
            Op.SETATTR: self.setattr,
            Op.MKDIR: self.mkdir,
            Op.UNLINK: self.unlink,
            Op.RMDIR: self.unlink,
            Op.RENAME: lambda node, body: self.rename(node, body, 8),
            Op.RENAME2: lambda node, body: self.rename(node, body, 16),
            Op.OPEN: self.open,
            Op.READ: self.read,
            Op.WRITE: self.write,
            Op.STATFS: self.statfs,
            Op.RELEASE: self.release,
            Op.FSYNC: self.fsync,
            Op.FLUSH: lambda node, _: b"",
            Op.INIT: self.init,
            Op.OPENDIR: lambda node, _: fuse.OPEN_OUT.pack(0, 0, 0),
            Op.READDIR: self.readdir,
            Op.RELEASEDIR: lambda node, _: b"",
            Op.FSYNCDIR: self.fsyncdir,
            Op.CREATE: self.create,
            Op.FALLOCATE: self.fallocate,
            Op.LSEEK: self.lseek,
        }

    # Serving ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """One thread of several: a request that is delayed holds no other up."""
        while True:
            try:
                raw = os.read(self.fd, fuse.MAX_WRITE + 8192)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, opcode, unique, node, *_ = fuse.IN_HEADER.unpack_from(raw)
            if opcode in fuse.SILENT:
                continue
            try:
                handler = self.handlers.get(opcode)
                if handler is None:
                    raise OSError(errno.ENOSYS, "not spoken here")
                code, reply = 0, handler(node, raw[fuse.IN_HEADER.size :])
            except OSError as error:
                code, reply = -(error.errno or errno.EIO), b""
            head = fuse.OUT_HEADER.pack(fuse.OUT_HEADER.size + len(reply), code, unique)
            with contextlib.suppress(OSError):  # the caller was killed meanwhile
                os.write(self.fd, head + reply)

    def path(self, node: int, name: str = "") -> str:
        where = os.path.relpath(os.readlink(self.nodes[node].handle), self.behind)
        return os.path.normpath(os.path.join(where, name))

    def apply(
        self, op: str, path: str, offset: int = 0, nbytes: int = 0, content: bytes = b""
    ) -> Rule | None:
        """What the rules say of this operation, as far as it does not depend on it; else the rule."""
        rule = self.rules.match(op, path, offset, nbytes, content)
        if rule is None:
            return None
        if rule.action is Action.FAIL:
            raise OSError(rule.errno, "as told")
        if rule.action is Action.VANISH:
            os._exit(0)  # the kernel fails what is in flight, and all that comes
        if rule.action is Action.DELAY:
            time.sleep(rule.seconds)
        return rule

    @contextlib.contextmanager
    def logged(self, op: str, path: str, offset: int = 0, content: bytes = b""):  # type: ignore[no-untyped-def]
        if self.log is None:
            yield
            return
        with self.lock:
            self.marks += 1
            number = self.marks
            self.log.append(("begin", number, op, path, offset, content))
        yield
        with self.lock:
            self.log.append(("end", number, op, path, offset, b""))

    # Names --------------------------------------------------------------------------------------------------

    def entry(self, parent: int, name: str) -> bytes:
        fd = os.open(f"{self.nodes[parent].handle}/{name}", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(fd)
        with self.lock:
            inode = (status.st_dev, status.st_ino)
            number = self.numbers.get(inode)
            if number is None:
                number = self.next_node
                self.next_node += 1
                self.numbers[inode] = number
                self.nodes[number] = Node(fd)  # held for good: so no inode number comes again
            else:
                os.close(fd)
        return fuse.ENTRY_HEAD.pack(number, 0, 0, 0, 0, 0) + fuse.pack_attr(status)

    def lookup(self, node: int, body: bytes) -> bytes:
        (name,) = fuse.names(body)
        self.apply("lookup", self.path(node, name))
        return self.entry(node, name)

    def attr(self, node: int) -> bytes:
        return fuse.ATTR_HEAD.pack(0, 0, 0) + fuse.pack_attr(os.stat(self.nodes[node].handle))

    def setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, _, _, mode, *_ = fuse.SETATTR_IN.unpack_from(body)
        handle, path = self.nodes[node].handle, self.path(node)
        if valid & fuse.SETATTR_SIZE:
            self.apply("truncate", path, size, 1)
            with self.logged("truncate", path, size):
                os.truncate(handle, size)
        if valid & fuse.SETATTR_MODE:
            os.chmod(handle, mode)
        if valid & fuse.SETATTR_MTIME:
            os.utime(handle, (mtime, mtime))
        return self.attr(node)

    def mkdir(self, node: int, body: bytes) -> bytes:
        (name,) = fuse.names(body[8:])
        path = self.path(node, name)
        self.apply("mkdir", path)
        with self.logged("mkdir", path):
            os.mkdir(f"{self.nodes[node].handle}/{name}")
        return self.entry(node, name)

    def unlink(self, node: int, body: bytes) -> bytes:
        (name,) = fuse.names(body)
        path, where = self.path(node, name), f"{self.nodes[node].handle}/{name}"
        self.apply("unlink", path)
        with self.logged("unlink", path):
            (os.rmdir if os.path.isdir(where) else os.unlink)(where)
        return b""

    def rename(self, node: int, body: bytes, head: int) -> bytes:
        target = int.from_bytes(body[:8], "little")
        old, new = fuse.names(body[head:], 2)
        source, destination = self.path(node, old), self.path(target, new)
        self.apply("rename", destination)
        with self.logged("rename", source, 0, destination.encode()):
            os.rename(f"{self.nodes[node].handle}/{old}", f"{self.nodes[target].handle}/{new}")
        return b""

    def readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = fuse.TRANSFER_IN.unpack_from(body)
        self.apply("readdir", self.path(node))
        reply = b""
        for position, name in enumerate(sorted(os.listdir(self.nodes[node].handle)), 1):
            raw = name.encode()
            entry = fuse.DIRENT.pack(position, position, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(reply) + len(entry) > size:
                break
            if position > offset:
                reply += entry
        return reply

    def fsyncdir(self, node: int, body: bytes) -> bytes:
        path = self.path(node)
        self.apply("fsyncdir", path)
        with self.logged("fsyncdir", path):
            pass
        return b""

    # Content ------------------------------------------------------------------------------------------------

    def open(self, node: int, body: bytes) -> bytes:
        flags, _ = fuse.OPEN_IN.unpack_from(body)
        path = self.path(node)
        self.apply("open", path)
        # The directory behind is read and written past no cache: alignment is the kernel's business in front.
        flags &= ~(os.O_DIRECT | os.O_NOFOLLOW | os.O_CREAT | os.O_EXCL)
        if flags & os.O_TRUNC:
            with self.logged("truncate", path, 0):
                fd = os.open(self.nodes[node].handle, flags | os.O_CLOEXEC)
        else:
            fd = os.open(self.nodes[node].handle, flags | os.O_CLOEXEC)
        return fuse.OPEN_OUT.pack(fd, 0, 0)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode, *_ = fuse.CREATE_IN.unpack_from(body)
        (name,) = fuse.names(body[fuse.CREATE_IN.size :])
        path = self.path(node, name)
        self.apply("create", path)
        with self.logged("create", path):
            where = f"{self.nodes[node].handle}/{name}"
            fd = os.open(where, (flags & ~os.O_DIRECT) | os.O_CREAT | os.O_CLOEXEC, mode & 0o7777)
        return self.entry(node, name) + fuse.OPEN_OUT.pack(fd, 0, 0)

    def release(self, node: int, body: bytes) -> bytes:
        os.close(fuse.OPEN_OUT.unpack_from(body)[0])
        return b""

    def read(self, node: int, body: bytes) -> bytes:
        fd, offset, size, *_ = fuse.TRANSFER_IN.unpack_from(body)
        rule = self.apply("read", self.path(node), offset, size)
        if rule and rule.action is Action.SHORT:
            size = min(size, rule.nbytes)
        content = os.pread(fd, size, offset)
        if rule and rule.action is Action.FLIP:
            content = _flip(content, rule, offset)
        return content

    def write(self, node: int, body: bytes) -> bytes:
        fd, offset, size, *_ = fuse.TRANSFER_IN.unpack_from(body)
        content = body[fuse.TRANSFER_IN.size : fuse.TRANSFER_IN.size + size]
        path = self.path(node)
        rule = self.apply("write", path, offset, size, content)
        if rule and rule.action is Action.SHORT:
            content = content[: rule.nbytes]
        if rule and rule.action is Action.FLIP:
            content = _flip(content, rule, offset)
        if rule and rule.action is Action.LOSE:
            return size.to_bytes(8, "little")
        with self.logged("write", path, offset, content):
            done = os.pwrite(fd, content, offset)
        return done.to_bytes(8, "little")

    def fsync(self, node: int, body: bytes) -> bytes:
        path = self.path(node)
        self.apply("fsync", path)
        with self.logged("fsync", path):
            pass  # what is behind lives as long as the test: only the order counts
        return b""

    def fallocate(self, node: int, body: bytes) -> bytes:
        fd, offset, length, mode, _ = fuse.FALLOCATE_IN.unpack_from(body)
        path = self.path(node)
        self.apply("fallocate", path, offset, length)
        with self.logged("fallocate", path, offset, b"%d %d" % (length, mode)):
            _fallocate(fd, mode, offset, length)
        return b""

    def lseek(self, node: int, body: bytes) -> bytes:
        fd, offset, whence, _ = fuse.LSEEK_IN.unpack_from(body)
        return os.lseek(fd, offset, whence).to_bytes(8, "little")

    # The file system ----------------------------------------------------------------------------------------

    def statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self.behind)
        self.apply("statfs", ".")
        head = (s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, s.f_namemax, s.f_frsize)
        return fuse.STATFS_OUT.pack(*head, *([0] * 7))

    def init(self, node: int, body: bytes) -> bytes:
        _, _, readahead, flags = (int.from_bytes(body[at : at + 4], "little") for at in (0, 4, 8, 12))
        pages = fuse.MAX_WRITE // 4096
        head = (*fuse.VERSION, readahead, flags & fuse.INIT_FLAGS, 64, 48, fuse.MAX_WRITE, 1, pages, 0)
        return fuse.INIT_OUT.pack(*head, *([0] * 8))


def _flip(content: bytes, rule: Rule, offset: int) -> bytes:
    """With ``at``, the bit of that byte; else counted from the text that it holds, or the beginning of the transfer."""
    byte = rule.bit // 8 + (content.find(rule.holding.encode()) if rule.at is None else rule.at - offset)
    if byte >= len(content):
        return content
    return content[:byte] + bytes([content[byte] ^ 1 << rule.bit % 8]) + content[byte + 1 :]


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), "fallocate")


def command(server: Server, line: dict[str, Any]) -> object:
    if "rule" in line:
        server.rules.add(Rule.from_json(line["rule"]))
    elif "clear" in line:
        server.rules.clear()
    elif "fired" in line:
        return server.rules.fired
    elif "length" in line:
        return len(server.log or ())
    elif "log" in line:
        with server.lock, open(line["log"], "wb") as file:
            pickle.dump(server.log, file)
    return "done"


def main() -> None:
    behind, target, keep = sys.argv[1:4]
    try:
        server = Server(behind, target, keep_log=keep == "log")
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    for _ in range(THREADS):
        threading.Thread(target=server.serve, daemon=True).start()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(command(server, json.loads(line))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
