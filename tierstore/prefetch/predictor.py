"""Which experts a layer will ask for, before its router has said so.

The exact set is known only after the router; in the backward pass it is what the forward pass used.
A predictor sees every set that was used and names the experts worth speculating on, in ascending
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import numpy as np


class PredictorName(Enum):
    ALL = "all"
    HISTORY = "history"
    NONE = "none"


class Predictor(Protocol):
    def observe(self, layer: int, experts: Sequence[int]) -> None:
        """A forward pass of ``layer`` used ``experts``."""
        ...

    def predict(self, layer: int) -> list[int]:
        """Experts that the next forward pass of ``layer`` is expected to use, ascending."""
        ...


class NoPrediction:
    """Speculates on nothing that is not known exactly."""

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        return

    def predict(self, layer: int) -> list[int]:
        return []


class AllExperts:
    """Every expert of ``experts`` (``most``: the first so many): right when a step has enough tokens to reach nearly
    all of them.
    """

    def __init__(self, experts: range, *, most: int = 0) -> None:
        self._all = list(experts)[: most or None]

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        return

    def predict(self, layer: int) -> list[int]:
        return list(self._all)


class HistoryPredictor:
    """Experts whose decayed activation frequency is at least one half; with ``most``, no more than so many, the
    most frequent (of equal ones, the first).

    After each pass ``frequency = decay * frequency + (1 - decay) * used``, starting from one half: before
    anything was seen every expert is worth a read.
    """

    THRESHOLD = 0.5

    def __init__(self, experts: range, *, decay: float = 0.75, most: int = 0) -> None:
        self._experts = experts
        self._most = most or None
        self._decay = decay
        self._frequency: dict[int, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}

    def observe(self, layer: int, experts: Sequence[int]) -> None:
        used = np.zeros(len(self._experts))
        used[[self._experts.index(expert) for expert in experts]] = 1.0
        old = self._frequency.get(layer)
        before = np.full(len(self._experts), self.THRESHOLD) if old is None else old
        self._frequency[layer] = self._decay * before + (1 - self._decay) * used

    def predict(self, layer: int) -> list[int]:
        if layer not in self._frequency:
            return list(self._experts)[: self._most]
        frequency = self._frequency[layer]
        surest = np.argsort(-frequency, kind="stable")[: self._most]
        likely = np.sort(surest[frequency[surest] >= self.THRESHOLD])
        return [self._experts[int(place)] for place in likely]


def make_predictor(name: PredictorName, experts: range, *, most: int = 0) -> Predictor:
    """The predictor called ``name`` for the ``experts`` of each layer that are kept here; ``most``: how many of a
    layer it may name at once (0: any number).
    """
    if name is PredictorName.ALL:
        return AllExperts(experts, most=most)
    return HistoryPredictor(experts, most=most) if name is PredictorName.HISTORY else NoPrediction()
