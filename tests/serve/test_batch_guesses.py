"""Guesses in batches: what is expected of a sequence's stream goes where the sequence goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from served_cases import Served, built_in, drawn

from tierstore.moe.guessing import RouterGuesses, StreamDrift
from tierstore.prefetch.predictor import Counts
from tierstore.serve.batch import GroupedRunner, InvariantRunner, PaddedRunner

LAYERS, EXPERTS = 2, 8


class Listener:
    """Adds up what is offered of each layer, as a predictor does."""

    def __init__(self) -> None:
        self.offered = np.zeros((LAYERS, EXPERTS), np.int64)

    def reach(self, layer: int) -> Sequence[int]:
        return range(layer + 1, LAYERS)

    def offer(self, source: int, layer: int, chosen_E: Counts) -> None:
        self.offered[layer] += chosen_E

    def take(self) -> np.ndarray:  # type: ignore[type-arg]
        offered, self.offered = self.offered, np.zeros_like(self.offered)
        return offered


@pytest.fixture
def listened() -> Iterator[tuple[Served, Listener]]:
    torch.manual_seed(0)
    model, served = built_in()
    listener = Listener()
    guesses = RouterGuesses(model.routers(), listener, frozen=torch.float32)
    yield served, listener
    guesses.remove()


@pytest.mark.parametrize("kind", [PaddedRunner, InvariantRunner])
def test_each_sequence_is_guessed_as_it_is_alone(
    listened: tuple[Served, Listener], kind: type[GroupedRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences join, wait, and leave: each step's guesses are the sum of those that its sequences have alone."""
    served, listener = listened
    monkeypatch.setattr(StreamDrift, "TOKENS", 1)  # with more, what few sequences have shown tells nothing
    prompts, tokens = drawn((5, 3, 7), vocabulary=61), drawn((6, 6, 6), vocabulary=61, seed=1)

    def alone(number: int) -> list[np.ndarray]:  # type: ignore[type-arg]
        runner = served.runner(InvariantRunner)
        (joined,) = runner.join([prompts[number]])
        listener.take()
        found = []
        for token in tokens[number]:
            runner.step({joined.number: token})
            found.append(listener.take())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(StreamDrift, "ahead", lambda self, layer, target, stream: torch.zeros_like(stream))
        plain = [alone(number) for number in range(3)]
    expected = [alone(number) for number in range(3)]
    assert not np.array_equal(plain, expected), "what is expected makes no difference"
    runner = served.runner(kind)
    taken = [0, 0, 0]

    def step(*numbers: int) -> None:
        listener.take()
        runner.step({number: tokens[number][taken[number]] for number in numbers})
        assert np.array_equal(listener.take(), sum(expected[number][taken[number]] for number in numbers))
        for number in numbers:
            taken[number] += 1

    runner.join(prompts[:2])
    step(0, 1)
    step(1)  # leaves the group of the other, which waits
    runner.join(prompts[2:])
    step(2)
    step(0, 1, 2)
    step(0, 2)
    step(0, 1, 2)
    runner.leave(1)
    step(0, 2)
    runner.leave(0)
    step(2)
    assert taken == [5, 4, 6]
