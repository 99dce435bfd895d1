"""In how many chunks the passes over a model's experts go, and what they carried (``tierstore.moe.chunks``)."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.moe.exchange import Rows
from tierstore.timeline import NullTimeline, TimelineSink


@dataclass(frozen=True, slots=True)
class PipelineDegrees:
    """In how many chunks passes go."""

    forward: int = 1
    backward: int = 1


@dataclass(slots=True)
class LayerLoads:
    """Sums over passes that were counted: what the slowest rank had to do in each (``MostRows``)."""

    passes: int = 0
    travelling: int = 0
    computed: int = 0
    experts: int = 0


class Pipelining:
    """How the passes over a model's experts are cut into chunks, and what they carried. Shared by all of its layers.

    ``degrees`` may change between steps, on all ranks alike. ``loads`` counts backward passes.
    """

    def __init__(self, timeline: TimelineSink | None = None) -> None:
        self.degrees = PipelineDegrees()
        self.loads = LayerLoads()
        self.timeline: TimelineSink = timeline or NullTimeline()

    def count(self, rows: Rows) -> None:
        """A backward pass takes the way of ``rows``."""
        most = rows.most()
        if most is not None:
            self.loads.passes += 1
            self.loads.travelling += most.travelling
            self.loads.computed += most.computed
            self.loads.experts += most.experts
