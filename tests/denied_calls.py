"""Python in a process of its own in which the kernel refuses system calls, as the seccomp filters of containers do."""

import platform
from collections.abc import Mapping

from child_process import run_python

#: The numbers of those that tests refuse; those since Linux 5.1 are the same on every architecture.
NUMBERS = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "fallocate": {"x86_64": 285, "aarch64": 47}.get(platform.machine(), -1),
}

_DENY = """
import ctypes, struct
def deny(calls):
    load, equal, give = 0x20, 0x15, 0x06  # the number of the call; skips one if it is another; the filter's answer
    code = [(load, 0, 0, 0)]
    for number, error in calls.items():
        code += [(equal, 0, 1, number), (give, 0, 0, 0x00050000 | error)]
    raw = b"".join(struct.pack("<HBBI", *each) for each in [*code, (give, 0, 0, 0x7FFF0000)])
    text = ctypes.create_string_buffer(raw)
    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(raw) // 8, ctypes.addressof(text))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(program)) == 0, ctypes.get_errno()  # PR_SET_SECCOMP
"""


def run_without(calls: Mapping[str, int], code: str, *arguments: str) -> str:
    """What ``code`` prints, with ``arguments`` in ``sys.argv``; ``calls`` fail with these errno from its start on."""
    numbers = {NUMBERS[name]: error for name, error in calls.items()}
    return run_python(f"{_DENY}\ndeny({numbers})\n{code}", *arguments).stdout
