"""What tests of engines share: pages of an arena, and the types of the fixtures in conftest.py."""

from collections.abc import Callable

from crash_states import Entry

from tierstore import _native as native

MakeEngine = Callable[..., native.Engine]
Events = Callable[[], list[Entry]]


def frame(arena: native.Arena, index: int, nbytes: int = 4096) -> native.Buffer:
    """The first ``nbytes`` of page ``index``."""
    return native.Buffer(arena, [(4096 * index, 4096)], nbytes)
