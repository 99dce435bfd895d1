"""Signals that ask a long run to stop at a moment of its own choosing."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

__all__ = ["Interrupts"]


class Interrupts:
    """SIGINT and SIGTERM within the block: the first asks a loop to stop where it next can, the second exits at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise SystemExit(128 + number)
        self.asked = True

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
