"""What is expected of a stream: averages by hand, and rows that follow their sequences."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tierstore.moe.guessing import StreamDrift

WIDTH = 3


def streams(*rows: float) -> Tensor:
    """(B, 1, D): a token of each row is so much in every feature."""
    return torch.tensor(rows, dtype=torch.float32).view(-1, 1, 1).expand(-1, 1, WIDTH).contiguous()


def prompt(*tokens: Sequence[float]) -> Tensor:
    """(B, T, D): each of ``tokens`` has that of each row."""
    return torch.cat([streams(*rows) for rows in tokens], dim=1)


def one_pass(drift: StreamDrift, first: Tensor, second: Tensor) -> list[float] | None:
    """Layer 0 looks ahead to layer 1, which then starts; what was expected of each row's stream meanwhile."""
    drift.arrive(0, first)
    expected = listed(drift.ahead(0, 1, first))
    drift.arrive(1, second)
    return expected


def listed(expected: Tensor | None) -> list[float] | None:
    """By row, as all features are alike."""
    if expected is None:
        return None
    assert torch.equal(expected, expected[:, :, :1].expand_as(expected))
    return expected[:, 0, 0].tolist()


def added(drift: StreamDrift, rows: int) -> list[float] | None:
    """What each row is expected to be given on its way."""
    return listed(drift.ahead(0, 1, torch.zeros(rows, 1, WIDTH)))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages are given from the first token on."""
    monkeypatch.setattr(StreamDrift, "TOKENS", 1)


@pytest.mark.usefixtures("at_once")
def test_by_hand() -> None:
    drift = StreamDrift()
    assert one_pass(drift, streams(1, 10), streams(2, 14)) is None
    assert added(drift, 2) == [1, 4]
    assert one_pass(drift, streams(0, 0), streams(5, 4)) == [1, 4]
    assert added(drift, 2) == [0.75 * 1 + 0.25 * 5, 4]


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("lengths", [(20, 20, 20), (20, 3, 1), (6, 7, 8), (9, 8, 2)])
def test_a_prompt_is_its_last_tokens_one_after_another(lengths: tuple[int, int, int]) -> None:
    """Padding precedes the shorter ones, and tells nothing."""
    generator = torch.Generator().manual_seed(1)
    before, after = torch.randint(0, 100, (2, 3, max(lengths)), generator=generator).tolist()
    drift = StreamDrift(lengths)
    for row, length in enumerate(lengths):
        padding = max(lengths) - length
        before[row][:padding] = [float("nan")] * padding
    one_pass(drift, prompt(*zip(*before, strict=True)), prompt(*zip(*after, strict=True)))
    expected = []
    for row, length in enumerate(lengths):
        in_turn = StreamDrift()
        for token in range(-min(length, StreamDrift.PROMPT_TOKENS), 0):
            one_pass(in_turn, streams(before[row][token]), streams(after[row][token]))
        expected += added(in_turn, 1) or []
    assert added(drift, 3) == pytest.approx(expected, rel=1e-5)
    one_pass(drift, streams(0, 0, 0), streams(8, 8, -8))
    expected = [0.75 * old + 0.25 * new for old, new in zip(expected, (8, 8, -8), strict=True)]
    assert added(drift, 3) == pytest.approx(expected, rel=1e-5)


def test_of_prompts_the_shortest_tells_how_much_is_known() -> None:
    for lengths, known in (((9, 3), True), ((9, 2), True), ((2,), False), ((3,), True)):
        drift = StreamDrift(lengths)
        token = [0.0] * len(lengths)
        one_pass(drift, prompt(*[token] * max(lengths)), prompt(*[token] * max(lengths)))
        assert (added(drift, len(lengths)) is not None) == known


@pytest.mark.parametrize(("rows", "passes"), [(1, 3), (2, 2), (3, 1), (8, 1)])
def test_a_few_tokens_must_have_been_seen(rows: int, passes: int) -> None:
    drift = StreamDrift()
    for _ in range(passes):
        assert one_pass(drift, streams(*range(rows)), streams(*range(2, rows + 2))) is None
    assert one_pass(drift, streams(*range(rows)), streams(*range(2, rows + 2))) == [2] * rows


@pytest.mark.usefixtures("at_once")
def test_each_layer_that_looks_ahead_has_an_average_of_its_own() -> None:
    drift = StreamDrift()
    values = (0.0, 1.0, 3.0)

    def one_pass() -> list[list[list[float] | None]]:
        """What each layer expects of the later ones."""
        found = []
        for layer, value in enumerate(values):
            drift.arrive(layer, streams(value))
            found.append(
                [listed(drift.ahead(layer, target, streams(value))) for target in range(layer + 1, 3)]
            )
        return found

    assert one_pass() == [[None, None], [None], []]
    assert one_pass() == [[[1], [3]], [[2]], []]


@pytest.mark.usefixtures("at_once")
def test_an_average_ends_with_a_pass_that_nobody_looked_ahead_in() -> None:
    drift = StreamDrift()
    one_pass(drift, streams(0), streams(2))
    for layer in range(2):
        drift.arrive(layer, streams(100))
    assert added(drift, 1) is None
    one_pass(drift, streams(0), streams(8))
    assert added(drift, 1) == [8], "nothing of the old one"


def test_a_prompt_is_not_kept() -> None:
    drift = StreamDrift()
    assert drift.ahead(0, 1, torch.ones(1, 4096, WIDTH)) is None
    (seen,) = drift._seen[1].values()
    assert seen.untyped_storage().nbytes() == StreamDrift.PROMPT_TOKENS * 4 * WIDTH


@pytest.mark.usefixtures("at_once")
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
    assert added(strange, 3) is None, "a batch that knows nothing"
    one_pass(strange, streams(0, 0, 0), streams(1, 2, 3))
    assert added(strange, 3) == [1, 2, 3]


def test_of_joined_batches_the_youngest_tells_what_is_known() -> None:
    old, new = StreamDrift(), StreamDrift()
    for _ in range(3):
        one_pass(old, streams(0), streams(4))
    one_pass(new, streams(0), streams(6))
    assert added(old, 1) == [4]
    assert added(StreamDrift.joined([old, new]), 2) is None
    one_pass(new, streams(0), streams(6))
    assert added(StreamDrift.joined([old, new]), 2) == [4, 6]
    assert added(StreamDrift.joined([old, new]).select([0]), 1) is None
