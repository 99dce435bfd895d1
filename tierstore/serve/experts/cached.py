"""Experts leased from the host cache, with guesses only while they pay.

Reading a correct guess hides a wait; reading a wrong one costs disk time and space in the cache. Which prevails depends on
the model, its cache and the text. So the counters of the residency core decide: if less than half of the speculated bytes
whose outcome is known were used, guesses pause for some passes and are then tried again. The counters depend only on the
order of the program, and so do the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from tierstore._native import Residency
from tierstore.moe.source import ExpertLease
from tierstore.prefetch.experts import FrozenExperts
from tierstore.prefetch.lora import LoraExperts
from tierstore.prefetch.predictor import Counts, Predictor
from tierstore.prefetch.program import GuessCounts
from tierstore.serve.experts import ServingPhase

#: The least share of speculated bytes that must be used: a wasted read costs what a used one saves.
LEAST_USED = 0.5


class GatedPredictor:
    """Guesses like ``inner``, or not at all (``Predictor``).

    ``settled``: the speculated bytes whose outcome is known, since the store was opened: used, and wasted. Each ``window``
    bytes of them are judged: if too few were used, the rest of the pass and ``pause`` more passes have no guesses.
    """

    def __init__(
        self, inner: Predictor, settled: Callable[[], tuple[int, int]], *, window: int, pause: int = 16
    ) -> None:
        self._inner, self._settled = inner, settled
        self._window, self._pause = window, pause
        self._since = settled()
        #: Passes left of a pause, including the current one.
        self._left = 0
        #: Whether the current pass has no guesses.
        self.closed = True

    def begin(self, *, read: bool) -> None:
        """Begin a forward pass. If the last one ``read`` nothing, all experts in use are in memory, and this pass skips
        guesses, which cost a router's product in each layer.
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
        """The guesses of ``inner``; none if nothing has to be read, or too little of what is read is used."""
        if self.closed:
            return []
        now = self._settled()
        used, wasted = (count - before for count, before in zip(now, self._since, strict=True))
        if used + wasted >= self._window:
            self._since = now
            if used < LEAST_USED * (used + wasted):
                self._left = self._pause + 1
                self.closed = True
                return []
        return self._inner.predict(layer)


def settled_bytes(residency: Residency) -> tuple[int, int]:
    """The counters of ``residency``, for ``GatedPredictor``."""
    stats = residency.stats()
    return stats.useful_prefetch_bytes, stats.wasted_prefetch_bytes


class CachedExperts:
    """Experts leased from the host cache, in place or through a few device slots (``ServedExperts``)."""

    def __init__(
        self, frozen: FrozenExperts | LoraExperts, residency: Residency, gate: GatedPredictor | None = None
    ) -> None:
        """``residency``: that of the host cache; ``gate``: the predictor of ``frozen``, if it may pause guesses."""
        self._frozen = frozen
        self._gate, self._residency = gate, residency
        self._begun = False
        #: The leases of the last requested layer.
        self._leases: Iterator[ExpertLease] | None = None
        #: Bytes that had been read when the last pass began; None before the first.
        self._read_bytes: int | None = None

    @property
    def guesses(self) -> GuessCounts:
        return self._frozen.guesses

    @property
    def late_prefetch_bytes(self) -> int:
        return self._frozen.late_prefetch_bytes

    def begin(self, phase: ServingPhase, tokens: int) -> None:
        """Begin a forward pass. Leases that a pass left open when it raised are closed."""
        self._end()
        if self._begun:
            self._residency.end_step()  # for policies and in traces each pass is a step
        self._begun = True
        if self._gate is not None:
            read_bytes = self._residency.stats().read_bytes
            self._gate.begin(read=read_bytes != self._read_bytes)
            self._read_bytes = read_bytes
        self._frozen.begin_evaluation()

    def set_requesters(self, requesters: Mapping[int, int]) -> None:
        self._frozen.set_requesters(requesters)

    def forward(self, layer: int, experts: Sequence[int]) -> Iterator[ExpertLease]:
        """Lease ``experts`` (ascending), those in memory first."""
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

    def _end(self) -> None:
        """Close the open access, if any: a traceback may keep its iterator alive for long."""
        leases, self._leases = self._leases, None
        close = getattr(leases, "close", None)
        if close is not None:
            close()
