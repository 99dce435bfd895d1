"""Ring memory (SE-MoE section 3.2): the experts of K of the N MoE layers, in groups of device slots.

Each layer in the ring has a group of E slots, whose addresses never change. When layer i has computed, its group is
refilled in the background with the experts of the first layer that comes next and is not in the ring: where passes follow
one another that is the one K ahead, counted around the N layers, so that the first layers of the next token are there when
it begins. With K = N all is resident and nothing moves.

::

    N = 5, K = 2      pass of layer:   0    1    2    3    4    0    1
    group A holds                      0    2    2    4    4    1    1
    group B holds                      1    1    3    3    0    0    2
    loaded when it has computed        2    3    4    0    1    2    3

What a group is refilled with depends on the order of passes alone. A layer that is passed over, or a pass that begins again
after an error, is no special case: the ring then holds layers that are not next, and gives them up first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierstore.errors import BudgetError
from tierstore.moe.source import ExpertLease
from tierstore.serve.experts.slots import Asked, ExpertSlots
from tierstore.timeline import NullTimeline, TimelineSink, Track


@dataclass(slots=True)
class _Refill:
    """A group's load, for the timeline."""

    name: str
    layer: int
    start_ns: int
    slots: range


class Ring:
    """The experts of ``count`` of ``layers`` (in the order of passes, ``experts`` each) in the first slots of ``slots``.

    ``depth``: how many layers beyond those in the ring the host cache reads ahead.
    """

    def __init__(
        self,
        slots: ExpertSlots,
        layers: Sequence[int],
        experts: int,
        *,
        count: int,
        depth: int = 1,
        timeline: TimelineSink | None = None,
    ) -> None:
        if not 1 <= count <= len(layers) or count * experts > slots.count:
            raise BudgetError(
                f"ring.layers: expected 1 to {min(len(layers), slots.count // experts)} layers of {experts} experts in "
                f"{slots.count} slots, got {count}"
            )
        self._slots = slots
        self._layers = tuple(layers)
        self._place_of = {layer: place for place, layer in enumerate(layers)}
        self._experts = range(experts)
        self._count = count
        self._depth = depth
        self._timeline = timeline or NullTimeline()
        #: The group of each layer that is in the ring, by the layer's place.
        self._group_of: dict[int, int] = {}
        self._free = deque(range(count))
        self._refills: list[_Refill] = []

    @property
    def count(self) -> int:
        """K."""
        return self._count

    @property
    def held(self) -> dict[int, int]:
        """The group of each layer that is in the ring, or on its way; the layer that comes next is the first."""
        return {self._layers[place]: group for place, group in self._group_of.items()}

    def slots_of(self, group: int) -> range:
        """The slots of ``group``, one for each expert."""
        first = group * len(self._experts)
        return range(first, first + len(self._experts))

    def clear(self) -> None:
        """Chosen experts use the slots from now on: nothing is in the ring."""
        self._group_of.clear()
        self._free = deque(range(self._count))
        self._draw()
        self._refills.clear()

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` in their order; when the last has been computed the ring turns."""
        place = self._place_of[layer]
        self._turn_to(place, Asked.NOW)
        begun = time.monotonic_ns() if self._timeline.enabled else 0
        slots = self.slots_of(self._group_of[place])
        for expert in experts:
            try:
                weights = self._slots.weights(slots[expert], layer)
            except BaseException:
                self._forget(place)
                raise
            yield ExpertLease(expert, weights)
            self._slots.release(slots[expert])
            self._draw()
        if self._timeline.enabled:
            name, args = f"experts of layer {layer}", {"group": self._group_of[place]}
            self._timeline.add(Track.COMPUTE, name, begun, time.monotonic_ns(), args)
        self._turn_to(place + 1, Asked.AHEAD)

    def _turn_to(self, place: int, asked: Asked) -> None:
        """Brings the layers from ``place`` on into the ring, nearest first; ``asked``: when that one was asked for."""
        total = len(self._layers)
        wanted = [(place + ahead) % total for ahead in range(self._count)]
        if list(self._group_of) == wanted:
            return
        for stale in [known for known in self._group_of if known not in wanted]:
            self._forget(stale)
        held, self._group_of = self._group_of, {}
        for known in wanted:
            if known in held:
                self._group_of[known] = held[known]
            else:
                self._group_of[known] = self._free.popleft()
                self._refill(known, asked if known == wanted[0] else Asked.AHEAD)
        if self._count < total:
            self._read_ahead([(place + ahead) % total for ahead in range(self._count, total)])

    def _refill(self, place: int, asked: Asked) -> None:
        layer, group = self._layers[place], self._group_of[place]
        self._slots.load(layer, self._experts, self.slots_of(group), asked)
        if self._timeline.enabled:
            name = f"group {group}: layer {layer}"
            self._refills.append(_Refill(name, layer, time.monotonic_ns(), self.slots_of(group)))

    def _read_ahead(self, places: Sequence[int]) -> None:
        """Layers that come after those in the ring, from disk to the host cache."""
        for place in places[: self._depth]:
            if self._slots.prefetch(self._layers[place], self._experts) < len(self._experts):
                return

    def _forget(self, place: int) -> None:
        self._free.append(self._group_of.pop(place))

    def _draw(self) -> None:
        """Puts the loads that have ended on the timeline; their end is when that was seen."""
        if not self._refills:
            return
        now = time.monotonic_ns()
        left = []
        for refill in self._refills:
            if all(map(self._slots.there, refill.slots)):
                args = {"layer": refill.layer}
                self._timeline.add(Track.RING, refill.name, refill.start_ns, now, args)
            else:
                left.append(refill)
        self._refills = left
