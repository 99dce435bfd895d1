"""Counters of the messages that dense slices cause."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DenseTraffic"]


@dataclass(slots=True)
class DenseTraffic:
    """Collectives issued, and bytes that this rank sent to others in them."""

    gathers: int = 0
    gather_bytes: int = 0
    reductions: int = 0
    reduction_bytes: int = 0

    def gathered(self, sent_bytes: int) -> None:
        self.gathers += 1
        self.gather_bytes += sent_bytes

    def reduced(self, sent_bytes: int) -> None:
        self.reductions += 1
        self.reduction_bytes += sent_bytes

    def since(self, before: DenseTraffic) -> DenseTraffic:
        """What was added since ``before`` was copied."""
        return DenseTraffic(
            self.gathers - before.gathers,
            self.gather_bytes - before.gather_bytes,
            self.reductions - before.reductions,
            self.reduction_bytes - before.reduction_bytes,
        )

    def copy(self) -> DenseTraffic:
        return self.since(DenseTraffic())
