"""The messages that dense slices cause: counted, and drawn on a timeline."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tierstore.parallel import Work
from tierstore.timeline import NullTimeline, TimelineSink, Track


@dataclass(slots=True)
class DenseTraffic:
    """Collectives issued, and bytes that this rank sent to others in them."""

    gathers: int = 0
    gather_bytes: int = 0
    reductions: int = 0
    reduction_bytes: int = 0

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


class DenseMessages:
    """Hears of each collective that sends something. On ``timeline`` it is drawn from its issue to the end of the wait
    for it, so one that was not waited for yet is not there.
    """

    def __init__(self, timeline: TimelineSink | None = None) -> None:
        self.traffic = DenseTraffic()
        self._timeline = timeline or NullTimeline()

    def gathered(self, work: Work, unit: str, sent_bytes: int) -> None:
        """A gather of ``unit`` was issued, in which this rank sends ``sent_bytes`` to others."""
        self.traffic.gathers += 1
        self.traffic.gather_bytes += sent_bytes
        self._draw(work, Track.GATHERS, f"gather {unit}", sent_bytes)

    def reduced(self, work: Work, unit: str, sent_bytes: int) -> None:
        """The same of a reduction of gradients."""
        self.traffic.reductions += 1
        self.traffic.reduction_bytes += sent_bytes
        self._draw(work, Track.REDUCTIONS, f"scatter {unit}", sent_bytes)

    def _draw(self, work: Work, track: Track, name: str, sent_bytes: int) -> None:
        issued_ns = time.monotonic_ns()

        def ended() -> None:
            self._timeline.add(track, name, issued_ns, time.monotonic_ns(), {"sent_bytes": sent_bytes})

        if self._timeline.enabled:
            work.observe(ended)
