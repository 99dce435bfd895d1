"""Runs ``tierstore`` as on a lesser machine: without io_uring, or without root's leave to read everything.

``python restricted.py no-uring|no-override ARGUMENTS..``. The restriction holds for this process alone.
"""

import ctypes
import errno
import struct
import sys

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_IO_URING_SETUP = 425  # of every architecture
_CAPABILITY_VERSION_3, _SYS_CAPSET = 0x20080522, {"x86_64": 126, "aarch64": 91}


def forbid_io_uring() -> None:
    """io_uring_setup fails with EPERM, as under a container's usual seccomp profile (see seccomp(2))."""
    load, jump_if_equal, give_back = 0x20, 0x15, 0x06
    allow, fail = 0x7FFF0000, 0x00050000 | errno.EPERM
    program = struct.pack(
        "<HBBIHBBIHBBIHBBI",
        *(load, 0, 0, 0),
        *(jump_if_equal, 0, 1, _IO_URING_SETUP),
        *(give_back, 0, 0, fail),
        *(give_back, 0, 0, allow),
    )
    instructions = ctypes.create_string_buffer(program)
    filter_program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(filter_program), 0, 0),
    ):
        if libc.prctl(*(ctypes.c_ulong(argument) for argument in arguments)):
            raise OSError(ctypes.get_errno(), "prctl")


def give_up_capabilities() -> None:
    """All of them: root may then no longer read a file that nobody may read (see capset(2))."""
    import platform

    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_CAPSET[platform.machine()], header, ctypes.create_string_buffer(24)):
        raise OSError(ctypes.get_errno(), "capset")


if __name__ == "__main__":
    {"no-uring": forbid_io_uring, "no-override": give_up_capabilities}[sys.argv[1]]()
    from tierstore.cli.main import cli

    cli.main(sys.argv[2:])
