"""What ``ParameterStore.fetch`` hands out: a lease on pinned records, and views of their sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tierstore._native import Buffer
from tierstore.errors import StoreError
from tierstore.store.format import Group, RecordSchema

__all__ = ["Lease", "RecordView"]


class RecordView:
    """The fetched sections of one pinned record. Views are valid until the lease is released."""

    def __init__(self, schema: RecordSchema, groups: Mapping[Group, Sequence[Buffer]]) -> None:
        self._sections = {
            section.name: (section, buffer)
            for group, buffers in groups.items()
            for section, buffer in zip(schema.layout(group).sections, buffers, strict=True)
        }

    @property
    def sections(self) -> list[str]:
        return list(self._sections)

    def view(self, name: str) -> npt.NDArray[np.generic]:
        """The section itself, read-only and without a copy.

        Raises KeyError for a section that was not fetched, ValueError when its frames are not adjacent:
        ``copy`` always works.
        """
        section, buffer = self._sections[name]
        array = buffer.array().view(section.dtype)
        array.flags.writeable = False
        return array

    def copy(self, name: str) -> npt.NDArray[np.generic]:
        """A copy of the section. Raises KeyError for one that was not fetched."""
        section, buffer = self._sections[name]
        content = np.empty(section.nbytes, np.uint8)
        buffer.copy_to(content)
        return content.view(section.dtype)


class Lease:
    """Records pinned in memory; a context manager and a mapping of keys to ``RecordView``."""

    def __init__(
        self, views: Mapping[str, RecordView], tickets: Sequence[int], release: Callable[[], None]
    ) -> None:
        self._views = views
        self._release: Callable[[], None] | None = release
        #: Engine tickets after which the views hold what they should.
        self.tickets = list(tickets)

    def __getitem__(self, key: str) -> RecordView:
        if self._release is None:
            raise StoreError("the lease was released")
        return self._views[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def release(self) -> None:
        """Unpins the records. Safe to call twice."""
        if self._release is not None:
            release, self._release = self._release, None
            release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
