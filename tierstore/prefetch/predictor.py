"""Predictors of the experts that a layer will request, before its router has chosen.

The exact set is known only after the router; in the backward pass it is the set that the forward pass used. A predictor
sees every set that was used and names the experts worth prefetching, in ascending order. ``RouterPredictor`` also receives
what the routers of later layers choose for the current hidden states (``tierstore.moe.guessing``), in training and decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt


class PredictorName(Enum):
    """What a forward pass is expected to use: all experts, the frequent ones, none, or those that the layer's router
    chooses for an earlier layer's hidden states.
    """

    ALL = "all"
    HISTORY = "history"
    NONE = "none"
    ROUTER = "router"


Counts = npt.NDArray[np.int64]


class Predictor(Protocol):
    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """Record that a forward pass of ``layer`` used ``experts``."""
        ...

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        """Record how often the router of ``layer`` chooses each expert of the model for the input of layer ``source``.
        Offers of one source add up until ``layer`` is observed (micro-batches).
        """
        ...

    def predict(self, layer: int) -> list[int]:
        """Experts that the next forward pass of ``layer`` is expected to use, ascending."""
        ...


class NoPrediction:
    """Predicts no experts: only exactly known sets are prefetched."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        return

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        return

    def predict(self, layer: int) -> list[int]:
        return []


class AllExperts:
    """Predicts all ``experts`` (the first ``most``, if not 0): right if a step has enough tokens to reach nearly all."""

    def __init__(self, experts: range, *, most: int = 0) -> None:
        self._all = list(experts)[: most or None]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        return

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        return

    def predict(self, layer: int) -> list[int]:
        return list(self._all)


class HistoryPredictor:
    """Predicts experts whose decayed activation frequency is at least one half; if ``most`` is not 0, only the ``most``
    most frequent (the first of equal ones).

    After each pass ``frequency = decay * frequency + (1 - decay) * used``. It starts at one half, so every expert is
    predicted at first.
    """

    THRESHOLD = 0.5

    def __init__(self, experts: range, *, decay: float = 0.75, most: int = 0) -> None:
        self._experts = experts
        self._most = most or None
        self._decay = decay
        self._frequency: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        after = self._decay * self.frequency(layer)
        after[np.asarray(experts, np.intp) - self._experts.start] += 1 - self._decay
        self._frequency[layer] = after

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        return

    def frequency(self, layer: int) -> npt.NDArray[np.float64]:
        """The frequency of each expert; one half before the first pass."""
        known = self._frequency.get(layer)
        return np.full(len(self._experts), self.THRESHOLD) if known is None else known

    def predict(self, layer: int) -> list[int]:
        if layer not in self._frequency:
            return list(self._experts)[: self._most]
        frequency = self._frequency[layer]
        surest = np.argsort(-frequency, kind="stable")[: self._most]
        return _named(self._experts, np.sort(surest[frequency[surest] >= self.THRESHOLD]))


@dataclass(slots=True)
class _Offer:
    """The choices that ``source`` has offered for a layer."""

    source: int
    chosen: Counts


class RouterPredictor:
    """Predicts the experts that a layer's own router chooses for the hidden states of an earlier layer. If these choices,
    summed over tokens, outnumber the experts, adds those whose decayed activation frequency is at least ``CERTAIN``.

    If ``most`` is not 0, only ``most`` are predicted: those chosen most often; of equal ones the most frequent, then the
    first. Without an offer it predicts what ``HistoryPredictor`` does; for an offer without experts, nothing. The last
    source that made an offer counts, which is the nearest.
    """

    #: With many tokens, routers miss some experts that are always used, and frequency finds them; between 0.6 and 0.8 both
    #: recall and precision exceed history's. With few tokens, the frequent experts are those of the prompt before them.
    CERTAIN = 0.7

    def __init__(self, experts: range, *, most: int = 0) -> None:
        self._experts = experts
        self._most = most or None
        self._history = HistoryPredictor(experts, most=most)
        self._offers: dict[int, _Offer] = {}

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        self._history.observe(layer, experts)
        self._offers.pop(layer, None)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        own = chosen_E[self._experts.start : self._experts.stop]
        held = self._offers.get(layer)
        if held is not None and held.source == source:
            own = held.chosen + own
        self._offers[layer] = _Offer(source, own)

    def predict(self, layer: int) -> list[int]:
        offer = self._offers.get(layer)
        if offer is None:
            return self._history.predict(layer)
        likely = np.flatnonzero(offer.chosen)
        if offer.chosen.sum() > len(self._experts):
            likely = np.union1d(likely, np.flatnonzero(self._history.frequency(layer) >= self.CERTAIN))
        if self._most is not None and len(likely) > self._most:
            frequency = self._history.frequency(layer)
            surest = np.lexsort((-frequency[likely], -offer.chosen[likely]))[: self._most]
            likely = np.sort(likely[surest])
        return _named(self._experts, likely)


def _named(experts: range, places: npt.NDArray[np.intp]) -> list[int]:
    named: list[int] = (places + experts.start).tolist()
    return named


def make_predictor(name: PredictorName, experts: range, *, most: int = 0) -> Predictor:
    """Make the predictor ``name`` for ``experts``, those of each layer that this rank owns. ``most``: how many of a layer
    it may predict at once (0: any number).
    """
    if name is PredictorName.ALL:
        return AllExperts(experts, most=most)
    if name is PredictorName.ROUTER:
        return RouterPredictor(experts, most=most)
    return HistoryPredictor(experts, most=most) if name is PredictorName.HISTORY else NoPrediction()
