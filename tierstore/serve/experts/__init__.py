"""The sources from which a served model's experts are leased.

::

    cached.py   the host cache; pauses guesses that do not pay
    ring.py     whole layers in device slots
    slotted.py  chosen and guessed experts in device slots, alternating with a ring
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from tierstore.moe.guessing import GuessListener
from tierstore.moe.source import ExpertSource
from tierstore.prefetch.program import GuessCounts


class ServingPhase(Enum):
    """The phase of a forward pass."""

    PREFILL = "prefill"  # whole prompts, which reach most experts of a layer
    DECODE = "decode"  # one token of each sequence


class ServedExperts(ExpertSource, GuessListener, Protocol):
    """Leases experts for forward passes. Call ``begin`` before each forward pass, also after one that raised, then
    ``forward`` in the order of the model's layers, some of which may be skipped.
    """

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """Begin a forward pass of ``tokens`` tokens in all."""
        ...

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        """Tell the cache policy which sequences request each expert of the next layer, one bit each
        (``Need.FIRST_SEQUENCE``). In a prompt only last tokens count. Calling it is optional.
        """
        ...

    @property
    def guesses(self) -> GuessCounts:
        """Counts of the guesses for its passes."""
        ...

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes of prefetches that were still in flight when they were needed."""
        ...
