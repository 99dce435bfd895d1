"""Signals that ask a long run to stop at a moment of its own choosing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """``handler`` for the signals ``numbers`` within the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that what was made in it is removed; the status is 143, as shells
    report it.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(leave, signal.SIGTERM):
        yield


class Interrupts:
    """Whether SIGINT or SIGTERM has asked a loop to stop where it next can; a second one exits at once."""

    asked = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise SystemExit(128 + number)
        self.asked = True

    @classmethod
    @contextmanager
    def heard(cls) -> Iterator[Interrupts]:
        """The signals within the block."""
        interrupts = cls()
        with _handled(interrupts._handle, signal.SIGINT, signal.SIGTERM):
            yield interrupts
