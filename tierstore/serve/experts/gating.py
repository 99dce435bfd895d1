"""Speculation that pays for itself: a predictor whose guesses are taken as long as most of what they read is used.

A read on a guess that comes true hides a wait; one that does not takes the disk's time and a place in memory. Which of them
prevails depends on the model, its cache and the text. So the residency core's own counts decide: where less than half of
what was speculated, and has come to its end, was used, guesses are passed over for a while, and then tried again. The counts
follow from the program's order alone, and so do the decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.model.spec import ModelSpec
from tierstore.prefetch.predictor import Counts, Predictor, PredictorName, make_predictor
from tierstore.serve.config import ServeConfig

#: The share of speculated bytes that must be used: a wasted read costs what a used one saves.
LEAST_USED = 0.5
#: Experts that routers guess of a layer at once, for each that a token chooses: those that most sequences are expected to
#: choose. A batch that reaches most experts of a layer keeps the disk busy anyway; more guesses only take the places of
#: experts that the next step would have found in memory.
GUESSED_PER_CHOSEN = 3


def served_predictor(config: ServeConfig, spec: ModelSpec) -> Predictor:
    """The predictor that ``config`` names, for all experts of a layer of ``spec``."""
    most = config.prefetch.guesses
    if not most and config.prefetch.predictor is PredictorName.ROUTER:
        most = GUESSED_PER_CHOSEN * spec.architecture.top_k
    return make_predictor(config.prefetch.predictor, range(spec.experts), most=most)


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
