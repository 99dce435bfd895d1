"""Experts leased from the host cache, and speculation that pays for itself.

A read on a guess that comes true hides a wait; one that does not takes the disk's time and a place in memory. Which of them
prevails depends on the model, its cache and the text. So the residency core's own counts decide: where less than half of
what was speculated, and has come to its end, was used, guesses are passed over for a while, and then tried again. The counts
follow from the program's order alone, and so do the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tierstore._native import Residency
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import GuessCounts
from tierstore.serve.experts import ServingPhase

#: The share of speculated bytes that must be used: a wasted read costs what a used one saves.
LEAST_USED = 0.5


@dataclass(frozen=True, slots=True)
class Settled:
    """Speculated bytes that have come to their end since the store was opened: used, or wasted."""

    used: int = 0
    wasted: int = 0

    def __sub__(self, other: Settled) -> Settled:
        return Settled(self.used - other.used, self.wasted - other.wasted)

    @property
    def total(self) -> int:
        return self.used + self.wasted


class GatedPredictor:
    """``inner``, or no guess (``Predictor``). ``settled`` counts; after ``window`` bytes they are judged, and where they
    fall short the rest of the pass and ``pause`` more have no guesses.
    """

    def __init__(
        self, inner: Predictor, settled: Callable[[], Settled], *, window: int, pause: int = 16
    ) -> None:
        self._inner, self._settled = inner, settled
        self._window, self._pause = window, pause
        self._since = settled()
        #: Passes that are left of a pause, with the present one.
        self._left = 0
        #: Whether the present pass goes without guesses.
        self.closed = True

    def begin(self, *, read: bool) -> None:
        """A forward pass begins. Where nothing was ``read`` in the one before, all that is used lies in memory: this one
        goes without guesses, which cost a router's product in each layer.
        """
        if self._left:
            self._left -= 1
            if not self._left:
                self._since = self._settled()
        self.closed = not read or self._left > 0

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._inner.observe(layer, experts)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        self._inner.offer(source, layer, chosen_E)

    def predict(self, layer: int) -> list[int]:
        """What ``inner`` predicts, unless nothing has to be read, or too little of it is used."""
        if self.closed:
            return []
        now = self._settled() - self._since
        if now.total >= self._window:
            self._since = self._settled()
            if now.used < LEAST_USED * now.total:
                self._left = self._pause + 1
                self.closed = True
                return []
        return self._inner.predict(layer)


def settled_bytes(residency: Residency) -> Settled:
    """What ``residency`` has counted."""
    stats = residency.stats()
    return Settled(stats.useful_prefetch_bytes, stats.wasted_prefetch_bytes)


class CachedExperts:
    """Experts leased from the host cache, where they lie or through a few slots of the device (``ServedExperts``)."""

    def __init__(
        self, frozen: FrozenExperts | LoraExperts, residency: Residency, gate: GatedPredictor | None = None
    ) -> None:
        """``residency``: of the host cache; ``gate``: what may pass over the guesses that ``frozen`` would take."""
        self._frozen = frozen
        self._gate, self._residency = gate, residency
        self._begun = False
        #: The leases of the layer that was asked for last.
        self._leases: Iterator[ExpertLease] | None = None
        #: What had been read when the last pass began; None before the first.
        self._read_bytes: int | None = None

    @property
    def guesses(self) -> GuessCounts:
        return self._frozen.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        return self._frozen.late_prefetch_bytes

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """A forward pass begins. What an earlier one that raised has left open is ended."""
        self._end()
        if self._begun:
            self._residency.end_step()  # to policies and in traces each pass is a step
        self._begun = True
        if self._gate is not None:
            read_bytes = self._residency.stats().read_bytes
            self._gate.begin(read=read_bytes != self._read_bytes)
            self._read_bytes = read_bytes
        self._frozen.begin_evaluation()

    def tell_askers(self, askers: Mapping[int, int]) -> None:
        self._frozen.tell_askers(askers)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Leases of ``experts`` (ascending), those in memory first."""
        self._end()
        self._leases = self._frozen.forward(layer, experts)
        return self._leases

    def backward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """The same for a backward pass."""
        self._end()
        self._leases = self._frozen.backward(layer, experts)
        return self._leases

    def reach(self, layer: int) -> list[int]:
        closed = self._gate is not None and self._gate.closed
        return [] if closed else self._frozen.reach(layer)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        self._frozen.offer(source, layer, chosen_E)

    def describe(self) -> list[str]:
        return ["experts on the device: the ring is not used: the CPU reads the host cache directly"]

    def _end(self) -> None:
        """Ends the access that is open, if any: a traceback may hold its iterator for long."""
        leases, self._leases = self._leases, None
        close = getattr(leases, "close", None)
        if close is not None:
            close()
