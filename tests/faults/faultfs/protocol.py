"""The FUSE protocol, as Linux's <linux/fuse.h> has it: requests, replies, and how a connection is mounted."""

import ctypes
import os
import struct
from enum import IntEnum

VERSION = (7, 31)
MAX_WRITE = 1 << 20
#: FUSE_ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, PARALLEL_DIROPS, MAX_PAGES. (Not ASYNC_DIO, with which the kernel makes
#: an error of a short direct write.)
INIT_FLAGS = 1 << 0 | 1 << 3 | 1 << 5 | 1 << 18 | 1 << 22
ROOT = 1

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<6Q3I7I")
ENTRY_HEAD = struct.Struct("<4Q2I")
ATTR_HEAD = struct.Struct("<Q2I")
INIT_OUT = struct.Struct("<4I2H2I2H8I")
OPEN_IN = struct.Struct("<2I")
OPEN_OUT = struct.Struct("<Q2I")
CREATE_IN = struct.Struct("<4I")
TRANSFER_IN = struct.Struct("<2Q2IQ2I")
FSYNC_IN = struct.Struct("<Q2I")
FALLOCATE_IN = struct.Struct("<3Q2I")
LSEEK_IN = struct.Struct("<2Q2I")
SETATTR_IN = struct.Struct("<2I6Q8I")
RENAME2_IN = struct.Struct("<Q2I")
STATFS_OUT = struct.Struct("<5Q4I6I")
DIRENT = struct.Struct("<2Q2I")

SETATTR_MODE, SETATTR_SIZE, SETATTR_MTIME = 1, 8, 32

_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45
    LSEEK = 46


#: Requests that the kernel expects no reply to.
SILENT = {Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT, Op.DESTROY}


def pack_attr(status: os.stat_result) -> bytes:
    times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
    return ATTR.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        *(t // 10**9 for t in times),
        *(t % 10**9 for t in times),
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        0,
        4096,
        0,
    )


def names(body: bytes, count: int = 1) -> list[str]:
    """``count`` names, each ended by a zero."""
    return [name.decode() for name in body.split(b"\0")[:count]]


def mount(target: str) -> int:
    """Mounts a connection at ``target``; returns its descriptor. Raises OSError."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"faultfs", target.encode(), b"fuse", _MS_NOSUID | _MS_NODEV, options.encode()):
        code = ctypes.get_errno()
        os.close(fd)
        raise OSError(code, f"mounting FUSE: {os.strerror(code)}", target)
    return fd


def unmount(target: str) -> None:
    """Takes the mount away, whatever still uses it."""
    ctypes.CDLL(None, use_errno=True).umount2(target.encode(), _MNT_DETACH)
