"""Where a served model's experts are leased from.

::

    cached.py   the host cache, or slots over it; guesses must pay for themselves
    ring.py     whole layers in slots
    slotted.py  chosen and guessed experts in slots, in turns with a ring
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

from tierstore.moe.guessing import GuessListener
from tierstore.moe.source import ExpertSource
from tierstore.prefetch.program import GuessCounts


class ServingPhase(Enum):
    """What a forward pass is part of."""

    PREFILL = "prefill"  # whole prompts: a layer reaches most of its experts
    DECODE = "decode"  # a token of each sequence


class ServedExperts(ExpertSource, GuessListener, Protocol):
    """Leases for forward passes. ``begin`` comes before each forward pass of the model, ``forward`` in the order of its
    layers (a layer may be passed over; a pass that raised is followed by ``begin``).
    """

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """A forward pass of ``tokens`` tokens in all begins."""
        ...

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        """Of the layer that comes next: the sequences that ask for each expert, a bit each (``Need.FIRST_ASKER``), for the
        cache policy; in a prompt those whose last token does. It may be left out.
        """
        ...

    @property
    def guesses(self) -> GuessCounts:
        """How its passes were guessed."""
        ...

    @property
    def late_prefetch_bytes(self) -> int:
        """Bytes that were on their way, but not there, when they were needed."""
        ...

    def describe(self) -> list[str]:
        """Lines on which experts the device holds now, and why."""
        ...
