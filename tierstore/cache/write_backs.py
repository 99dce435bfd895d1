"""Write-backs between two commits."""

from __future__ import annotations

from tierstore._native import Engine

#: Between commits the tickets of write-backs pile up; those that succeeded are swept at this many.
_SWEEP_WRITES = 4096


class WriteBacks:
    """Tickets of the write-backs that a commit has to wait for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tickets: list[int] = []
        self._sweep_at = _SWEEP_WRITES

    def add(self, ticket: int) -> None:
        self._tickets.append(ticket)
        if len(self._tickets) >= self._sweep_at:
            # One that failed stays, for the commit to find.
            self._tickets = [ticket for ticket in self._tickets if not self._succeeded(ticket)]
            self._sweep_at = 2 * len(self._tickets) + _SWEEP_WRITES

    def _succeeded(self, ticket: int) -> bool:
        if not self._engine.done(ticket):
            return False
        try:
            self._engine.wait(ticket)
        except Exception:
            return False
        return True

    def take(self) -> list[int]:
        """The tickets added since the last call."""
        taken, self._tickets = self._tickets, []
        return taken
