"""Guesses are taken while at least half of what they read is used, passed over for a while, and tried again."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tierstore.model.config import ModelConfig
from tierstore.model.spec import spec_of
from tierstore.prefetch.plan import PrefetchConfig
from tierstore.prefetch.predictor import AllExperts, PredictorName
from tierstore.serve.config import ServeConfig
from tierstore.serve.experts import GatedPredictor
from tierstore.serve.opening import served_predictor


def test_by_hand() -> None:
    counts = [(0, 0)]  # used, wasted
    gate = GatedPredictor(AllExperts(range(2)), lambda: counts[-1], window=10, pause=2)

    def one_pass(*, read: bool = True) -> list[list[int]]:
        gate.begin(read=read)
        return [gate.predict(layer) for layer in range(2)]

    assert gate.closed
    counts.append((4, 5))  # nine bytes: too few to judge
    assert one_pass() == [[0, 1], [0, 1]]
    counts.append((5, 5))  # half is enough
    assert one_pass() == [[0, 1], [0, 1]]
    gate.begin(read=True)
    assert gate.predict(0) == [0, 1]
    counts.append((9, 11))  # 4 of the last 10
    assert gate.predict(1) == []
    assert gate.closed, "the rest of the pass"
    for _ in range(2):
        assert one_pass() == [[], []]
        assert gate.closed
    counts.append((9, 99))  # what came to its end meanwhile is not held against it
    assert one_pass() == [[0, 1], [0, 1]]
    counts.append((19, 99))
    assert one_pass() == [[0, 1], [0, 1]]


def test_what_it_learns_from_goes_on_while_it_is_closed() -> None:
    seen: list[tuple[int, list[int]]] = []

    class Listening(AllExperts):
        def observe(self, layer: int, experts: Sequence[int]) -> None:
            seen.append((layer, list(experts)))

    gate = GatedPredictor(Listening(range(2)), lambda: (0, 0), window=1, pause=2)
    gate.begin(read=False)
    assert gate.closed
    gate.observe(3, [1])
    assert seen == [(3, [1])]


def test_a_pass_that_follows_one_without_reads_goes_without_guesses() -> None:
    gate = GatedPredictor(AllExperts(range(2)), lambda: (0, 0), window=10, pause=3)
    passes = []
    for read in (True, True, False, False, True, True):
        gate.begin(read=read)
        passes.append((gate.closed, gate.predict(0)))
    guesses, closed = (False, [0, 1]), (True, [])
    assert passes == [guesses, guesses, closed, closed, guesses, guesses]


def test_what_was_wasted_counts_across_passes_without_reads() -> None:
    wasted = 0
    gate = GatedPredictor(AllExperts(range(2)), lambda: (0, wasted), window=10, pause=3)
    guessed = 0
    for step in range(8):
        gate.begin(read=step % 2 == 0)
        if gate.predict(0):
            guessed += 1
            wasted += 6
    assert guessed == 2
    assert gate.closed


@pytest.mark.parametrize(
    ("predictor", "guesses", "most"),
    [("router", 0, 6), ("router", 5, 5), ("history", 0, 8), ("history", 5, 5), ("all", 0, 8), ("none", 0, 0)],
)
def test_routers_guess_three_experts_for_each_that_a_token_chooses(
    predictor: str, guesses: int, most: int
) -> None:
    prefetch = PrefetchConfig(predictor=PredictorName(predictor), guesses=guesses)
    spec = spec_of(ModelConfig(experts=8, top_k=2))
    config = ServeConfig(store=Path("unopened"), prefetch=prefetch)
    made = served_predictor(config, spec, range(spec.experts))
    made.observe(0, range(8))
    made.offer(0, 1, np.full(8, 3))
    assert len(made.predict(1)) == most
