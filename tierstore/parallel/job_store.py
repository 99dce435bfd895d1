"""What a job remembers from one attempt to the next: ``torchrun --max-restarts`` starts all ranks anew, and they must
know whether the stores that they find are their own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from tierstore.parallel.place import Place

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["JobNotes", "MemoryNotes", "Notes", "job_notes"]


class Notes(Protocol):
    """Words that stand until the job ends. Any rank may write; all ranks read the same."""

    def write(self, word: str) -> None: ...
    def written(self, word: str) -> bool: ...


class MemoryNotes:
    """Of a job that is never restarted: they end with the process."""

    def __init__(self) -> None:
        self._words: set[str] = set()

    def write(self, word: str) -> None:
        self._words.add(word)

    def written(self, word: str) -> bool:
        return word in self._words


class JobNotes:
    """Kept by ``torchrun`` itself, in the store where ranks meet, which outlives each attempt. Connects when it is first
    used.
    """

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._address = address
        self._timeout = timedelta(seconds=timeout_s)
        self._store: Store | None = None

    def _connected(self) -> Store:
        if self._store is None:
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            host, port = self._address
            store = TCPStore(host, port, is_master=False, timeout=self._timeout, wait_for_workers=False)
            self._store = PrefixStore("tierstore/job", store)
        return self._store

    def write(self, word: str) -> None:
        self._connected().set(word, "1")

    def written(self, word: str) -> bool:
        return self._connected().check([word])


def job_notes(place: Place, timeout_s: float, environ: Mapping[str, str] | None = None) -> Notes:
    """The notes of the job that this process belongs to; in memory where ``torchrun`` keeps none."""
    environ = os.environ if environ is None else environ
    if place.supervised and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return JobNotes(place.address, timeout_s)
    return MemoryNotes()
