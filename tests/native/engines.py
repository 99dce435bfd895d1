"""What tests of engines share: pages of an arena, and the types of the fixtures in conftest.py."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from crash_states import Entry

from tierstore import _native as native

MakeEngine = Callable[..., native.Engine]
Events = Callable[[], list[Entry]]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What would make a file larger fails with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def frame(arena: native.Arena, index: int, nbytes: int = 4096) -> native.Buffer:
    """The first ``nbytes`` of page ``index``."""
    return native.Buffer(arena, [(4096 * index, 4096)], nbytes)
