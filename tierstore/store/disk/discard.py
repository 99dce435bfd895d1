"""Whether the file systems of a store can free blocks inside of files (``FALLOC_FL_PUNCH_HOLE``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierstore._native import DirectIo, File, FileCreate
from tierstore.capabilities import Capability

_PAGE = 4096


class Discard:
    """The capability, resolved for the file systems of the directories ``scratch``. ON raises OSError where one cannot."""

    def __init__(self, wanted: Capability, scratch: Sequence[Path]) -> None:
        #: Why nothing is discarded; empty where discarding is on.
        self.reason = "off" if wanted is Capability.OFF else ""
        if wanted is not Capability.OFF:
            try:
                for directory in scratch:
                    _try(directory / "discard")
            except OSError as error:
                if wanted is Capability.ON:
                    raise
                self.reason = f"off ({error.strerror})"

    def __bool__(self) -> bool:
        return not self.reason

    def failed(self, error: OSError) -> None:
        """Turns discarding off: a hole could not be made. ``describe`` gives the reason."""
        self.reason = self.reason or f"off ({error.filename}: {error.strerror})"

    def describe(self) -> str:
        return f"discard: {self.reason or 'on'}"


def _try(path: Path) -> None:
    with File(str(path), create=FileCreate.YES, direct=DirectIo.OFF) as file:
        path.unlink()
        file.allocate(0, 2 * _PAGE)
        file.punch(0, _PAGE)
