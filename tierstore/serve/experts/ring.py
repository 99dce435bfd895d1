"""Ring memory (SE-MoE section 3.2): device slots that hold the experts of K of the N MoE layers.

It controls the device's cache (``DeviceCache``): when layer i has computed, its experts are given up, and those of the next
layer that is not in the ring are copied in the background. In consecutive passes that is layer i + K modulo N, so the first
layers of the next token are in the ring when it begins. With K = N all layers are resident and nothing moves.

::

    N = 5, K = 2      pass of layer:   0    1    2    3    4    0    1
    in the ring                        0 1  1 2  2 3  3 4  4 0  0 1  1 2
    copied when it has computed        2    3    4    0    1    2    3

Copies depend only on the order of passes. A skipped layer, or a pass that starts again after an error, is not a special
case: the ring then holds layers that are not next, and gives them up first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tierstore.cache.access import Need, Phase
from tierstore.errors import BudgetError
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.program import Access
from tierstore.timeline import NullTimeline, TimelineSink, Track


class Ring:
    """Holds the experts of ``count`` of ``layers`` (in the order of passes, ``experts`` each) in the slots of ``source``.

    ``depth``: number of layers beyond the ring that the host cache reads ahead. ``done``: whether a ticket has finished.
    """

    def __init__(
        self,
        source: FrozenExperts,
        layers: Sequence[int],
        experts: int,
        *,
        count: int,
        done: Callable[[int], bool],
        depth: int = 1,
        timeline: TimelineSink | None = None,
    ) -> None:
        slots = source.walk.slots.count
        if not 1 <= count <= len(layers) or count * experts > slots:
            raise BudgetError(
                f"ring.layers: expected 1 to {min(len(layers), slots // experts)} layers of {experts} experts in "
                f"{slots} slots, got {count}"
            )
        self._source, self._walk = source, source.walk
        self._layers = tuple(layers)
        self._experts = range(experts)
        self._count = count
        self._depth = depth
        self._done = done
        self._timeline = timeline or NullTimeline()
        #: The layers that are in the ring or being copied, the next one first.
        self.held: list[int] = []
        #: Layers whose copies are under way, when they began, and their tickets, for the timeline.
        self._refills: list[tuple[int, int, Sequence[int]]] = []

    def clear(self) -> None:
        """Empty all slots, for use by the ring."""
        for layer in self._layers:
            self._walk.give_up(layer)
        self.held.clear()
        self._refills.clear()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Lease ``experts`` in order; when the last has been computed, the ring turns."""
        place = self._layers.index(layer)
        self._turn_to(place)
        begun = self._timeline.now()
        asked = np.array(experts, np.uint32)
        weights = np.full(len(asked), int(Need.WEIGHTS), np.uint16)
        for lease in self._source.lease(
            Access(Phase.FORWARD, layer, asked, weights, np.zeros(len(asked), np.uint8), step=0)
        ):
            yield lease
            self._draw()
        self._timeline.add(Track.COMPUTE, f"experts of layer {layer}", begun, self._timeline.now())
        self._turn_to(place + 1)

    def _turn_to(self, place: int) -> None:
        """Bring the layers from ``place`` on into the ring, nearest first."""
        total = len(self._layers)
        wanted = [self._layers[(place + ahead) % total] for ahead in range(self._count)]
        if self.held == wanted:
            return
        for stale in [layer for layer in self.held if layer not in wanted]:
            self._walk.give_up(stale)
        for layer in [layer for layer in wanted if layer not in self.held]:
            tickets = self._walk.bring(layer, self._experts)
            if self._timeline.enabled:
                self._refills.append((layer, time.monotonic_ns(), tickets))
        self.held = wanted
        for ahead in range(self._count, min(self._count + self._depth, total)):
            following = self._layers[(place + ahead) % total]
            if self._walk.prefetch(following, self._experts) < len(self._experts):
                return

    def _draw(self) -> None:
        """Add finished copies to the timeline; their end is the time of this call."""
        if not self._refills:
            return
        now = time.monotonic_ns()
        for refill in self._refills.copy():
            layer, start_ns, tickets = refill
            if all(map(self._done, tickets)):
                self._refills.remove(refill)
                name, args = f"layer {layer} into the ring", {"layer": layer}
                self._timeline.add(Track.RING, name, start_ns, now, args)
