"""What is expected of a stream: averages by hand, and rows that follow their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tierstore.moe.drift import StreamDrift

WIDTH = 3


def streams(*rows: float, tokens: int = 1) -> Tensor:
    """(B, T, D): the last token of each row is so much in every feature, the ones before it are noise."""
    made = torch.randn(len(rows), tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    made[:, -1] = torch.tensor(rows).unsqueeze(1)
    return made


def one_pass(drift: StreamDrift, first: Tensor, second: Tensor) -> Tensor:
    """Layer 0 looks ahead to layer 1, which then starts; what had been expected of its stream."""
    drift.arrive(0, first)
    expected = drift.ahead(0, 1, first)
    drift.arrive(1, second)
    return expected


def added(drift: StreamDrift, rows: int) -> list[float]:
    """What each row is expected to be given on its way."""
    expected = drift.ahead(0, 1, torch.zeros(rows, 1, WIDTH))
    assert torch.equal(expected, expected[:, :, :1].expand_as(expected))
    return expected[:, 0, 0].tolist()


def test_by_hand() -> None:
    drift = StreamDrift()
    prompt = streams(1, 10, tokens=5)
    assert torch.equal(one_pass(drift, prompt, streams(2, 14, tokens=5)), prompt), "nothing is known yet"
    assert added(drift, 2) == [1, 4], "of the last tokens"
    assert torch.equal(one_pass(drift, streams(0, 0), streams(5, 4)), streams(1, 4))
    assert added(drift, 2) == [0.75 * 1 + 0.25 * 5, 4]


def test_each_layer_that_looks_ahead_has_an_average_of_its_own() -> None:
    drift = StreamDrift()
    values = (0.0, 1.0, 3.0)

    def one_pass() -> list[list[float]]:
        """What each layer expects of the later ones."""
        found = []
        for layer, value in enumerate(values):
            drift.arrive(layer, streams(value))
            found.append(
                [drift.ahead(layer, target, streams(value))[0, 0, 0].item() for target in range(layer + 1, 3)]
            )
        return found

    assert one_pass() == [[0, 0], [1], []]
    assert one_pass() == [[1, 3], [3], []]


def test_an_average_ends_with_a_pass_that_nobody_looked_ahead_in() -> None:
    drift = StreamDrift()
    one_pass(drift, streams(0), streams(2))
    for layer in range(2):
        drift.arrive(layer, streams(100))
    assert added(drift, 1) == [0]
    one_pass(drift, streams(0), streams(8))
    assert added(drift, 1) == [8], "nothing of the old one"


def test_a_prompt_is_not_kept() -> None:
    drift, prompt = StreamDrift(), streams(1, tokens=4096)
    assert drift.ahead(0, 1, prompt) is prompt
    (seen,) = drift._seen[1].values()
    assert seen.untyped_storage().nbytes() == 4 * WIDTH


def test_rows_follow_their_sequences() -> None:
    drift, other = StreamDrift(), StreamDrift()
    one_pass(drift, streams(0, 0, 0), streams(1, 2, 3))
    one_pass(other, streams(0), streams(4))
    left = drift.select([2, 0])
    assert added(left, 2) == [3, 1]
    assert added(drift, 3) == [1, 2, 3]
    both = StreamDrift.joined([left, other])
    assert added(both, 3) == [3, 1, 4]
    one_pass(both, streams(0, 0, 0), streams(3, 5, 4))
    assert added(both, 3) == [3, 2, 4]
    assert added(left, 2) == [3, 1]
    strange = StreamDrift.joined([left, StreamDrift()])
    assert added(strange, 3) == [0, 0, 0], "a batch that knows nothing"
    one_pass(strange, streams(0, 0, 0), streams(1, 2, 3))
    assert added(strange, 3) == [1, 2, 3]
