"""Batches: sequences join, go on and leave with the tokens and the bits that are promised; who guesses for them."""

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from effort import share
from refusals import refuses
from served_cases import Served, built_in, drawn, generated, greedy, wrapped
from tiny_families import FAMILIES
from torch import Tensor

from tierstore.errors import BudgetError, ChecksumError, ConfigError
from tierstore.moe.guessing import RouterGuesses, StreamDrift
from tierstore.prefetch.predictor import Counts
from tierstore.serve.batch import BatchRunner, InvariantRunner
from tierstore.serve.experts import ServingPhase

KINDS = (BatchRunner, InvariantRunner)


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_leases_an_expert_once(kind: type[BatchRunner]) -> None:
    """Two prompts, two layers: one access a layer for both of them, and so in a step. By hand: top-2 of 8 experts, so
    that a token asks for 2, and two tokens for at most 4.
    """
    _, served = built_in()
    runner = served.runner(kind)
    joined = runner.join(drawn((4, 4), vocabulary=61))
    assert [layer for layer, _ in served.experts.asked] == [0, 1]
    served.experts.asked.clear()
    runner.step(dict.fromkeys(joined, 5))
    assert [layer for layer, _ in served.experts.asked] == [0, 1]
    assert all(2 <= len(experts) <= 4 for _, experts in served.experts.asked)
    assert served.experts.begun == [(ServingPhase.PREFILL, 8), (ServingPhase.DECODE, 2)]


def test_padding_counts_as_tokens() -> None:
    _, served = built_in()
    served.runner(BatchRunner).join(drawn((1, 6), vocabulary=61))
    served.runner(InvariantRunner).join(drawn((1, 6), vocabulary=61))
    assert served.experts.begun == [(ServingPhase.PREFILL, 12), (ServingPhase.PREFILL, 7)]


@pytest.mark.parametrize("kind", KINDS)
def test_some_of_the_batch_goes_on(kind: type[BatchRunner]) -> None:
    """Steps of a part: the others wait, and go on as if nothing had been."""
    _, served = built_in()
    prompts = drawn((6, 3, 9), vocabulary=61)
    together = greedy(served.runner(kind), prompts, 4)
    runner = served.runner(kind)
    found = {number: [logits_V] for number, logits_V in runner.join(prompts).items()}
    for part in ((0,), (1, 2), (0, 2), (0, 1), (1,), (2,)):
        logits = runner.step({number: int(found[number][-1].argmax()) for number in part})
        assert set(logits) == set(part)
        for number, logits_V in logits.items():
            found[number].append(logits_V)
    assert runner.numbers == (0, 1, 2)
    for number, (tokens, expected) in enumerate(together):
        assert [int(each.argmax()) for each in found[number]] == tokens
        torch.testing.assert_close(torch.stack(found[number]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_error_the_others_are_as_before(kind: type[BatchRunner]) -> None:
    _, served = built_in()
    prompts = drawn((5, 7, 4), vocabulary=61)
    expected = greedy(served.runner(kind), prompts[:1], 4)[0][1]
    runner = served.runner(kind)
    ((first, logits_V),) = runner.join(prompts[:1]).items()
    found = [logits_V]

    def step(also: dict[int, int]) -> None:
        found.append(runner.step({first: int(found[-1].argmax())} | also)[first])

    step({})
    served.experts.failing = (1, ChecksumError("expert 3"))
    with pytest.raises(ChecksumError):
        runner.join(prompts[1:])
    assert runner.numbers == (first,)
    step({})
    (second, third) = runner.join(prompts[1:])
    served.experts.failing = (1, ChecksumError("expert 3"))
    with pytest.raises(ChecksumError):
        runner.step({second: 1, third: 2})
    assert runner.numbers == (first,)
    step({})
    torch.testing.assert_close(torch.stack(found), expected)
    if kind is InvariantRunner:
        assert torch.equal(torch.stack(found), expected)
    served.experts.failing = (0, OSError(5, "read"))
    with refuses(OSError, "read"):
        step({})
    assert runner.numbers == ()
    again = greedy(runner, prompts[:1], 4)[0][1]
    assert torch.equal(again, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_that_had_left_goes_on(kind: type[BatchRunner]) -> None:
    """After a pass that failed: with the logits that it would have had, and where bits are promised with their bits."""
    _, served = built_in()
    (prompt, other) = drawn((6, 3), vocabulary=61)
    tokens, expected = greedy(served.runner(kind), [prompt], 9)[0]
    runner = served.runner(kind)
    (joined, beside) = (next(iter(runner.join([each]))) for each in (prompt, other))
    served.experts.failing = (1, ChecksumError("expert 3"))
    with pytest.raises(ChecksumError):
        runner.step({joined: tokens[0], beside: 1})
    resumed, logits_V = runner.resume(prompt, tokens[:4])
    runner.resume(other, [1])
    found = [logits_V]
    for token in tokens[4:8]:
        found.append(runner.step({resumed: token})[resumed])
    torch.testing.assert_close(torch.stack(found), expected[4:])
    if kind is InvariantRunner:
        assert torch.equal(torch.stack(found), expected[4:])
    served.experts.failing = (0, OSError(5, "read"))
    with refuses(OSError, "read"):
        runner.resume(other, [1, 2])
    assert len(runner.numbers) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_changes_nothing(kind: type[BatchRunner]) -> None:
    _, served = built_in(context=8)
    runner = served.runner(kind, sequences=2)
    with refuses(BudgetError, "batch.sequences:", 3, 2):
        runner.join(drawn((2, 2, 2), vocabulary=61))
    with refuses(BudgetError, "batch.context:", 9, 8):
        runner.join(drawn((9,), vocabulary=61))
    with refuses(ValueError, "prompt", "one token"):
        runner.join([[]])
    with refuses(ValueError, "token 61:", "0 to 60"):
        runner.join([[1, 61]])
    (joined,) = runner.join(drawn((7,), vocabulary=61))
    with refuses(ValueError, "token -1:", "0 to 60"):
        runner.step({joined: -1})
    runner.step({joined: 3})
    with refuses(BudgetError, "batch.context:", "sequence 0", 8):
        runner.step({joined: 3})
    assert runner.numbers == (0,)
    runner.leave(0)
    assert runner.numbers == ()
    with pytest.raises(KeyError):
        runner.leave(0)


def test_a_context_beyond_the_models() -> None:
    with refuses(ConfigError, "batch.context:", 48, "got 49"):
        built_in(context=49)
    with refuses(ConfigError, "batch.context:", 128, "got 129"):
        wrapped("mixtral", context=129)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "rope_theta": 1e4}
    _, served = wrapped(
        "phimoe",
        rope_parameters={
            **rope,
            "original_max_position_embeddings": 64,
            "short_mscale": 1.0,
            "long_mscale": 1.0,
        },
    )
    assert served.model.context == 64  # keys of both sets of frequencies do not mix


class _Interleaved:
    """Random joins, steps of some or all, and leaves; what each sequence was given by the way."""

    def __init__(self, served: Served, seed: int) -> None:
        self.runner = served.runner(InvariantRunner, sequences=4)
        self.prompts: dict[int, list[int]] = {}
        self.logits: dict[int, list[Tensor]] = {}
        self._random = random.Random(seed)

    def run(self, actions: int) -> None:
        for _ in range(actions):
            here = self.runner.numbers
            action = self._random.choice(("join", "step", "step", "leave"))
            if action == "join" and len(here) < 4:
                self._join(self._random.randint(1, 4 - len(here)))
            elif action == "step" and here:
                stepping = self._random.sample(here, self._random.randint(1, len(here)))
                chosen = {number: int(self.logits[number][-1].argmax()) for number in stepping}
                for number, logits_V in self.runner.step(chosen).items():
                    self.logits[number].append(logits_V)
            elif action == "leave" and here:
                self.runner.leave(self._random.choice(here))

    def _join(self, count: int) -> None:
        lengths = [self._random.choice((1, 2, 3, 5, 8)) for _ in range(count)]
        prompts = drawn(lengths, vocabulary=61, seed=self._random.randrange(6))
        for (number, logits_V), prompt in zip(self.runner.join(prompts).items(), prompts, strict=True):
            self.prompts[number] = prompt
            self.logits[number] = [logits_V]


def _alone(served: Served, prompt: list[int], count: int, known: dict[tuple[int, ...], Tensor]) -> Tensor:
    """What a request gets alone: the logits of ``count`` tokens."""
    held = known.get(tuple(prompt))
    if held is None or len(held) < count:
        held = known[tuple(prompt)] = greedy(served.runner(InvariantRunner), [prompt], max(count, 12))[0][1]
    return held[:count]


@pytest.mark.parametrize("cases", [20, pytest.param(share(100), marks=pytest.mark.slow)])
def test_neighbours_change_no_bit(cases: int) -> None:
    """Random interleavings of joins, steps and leaves: each request has the bits that it gets alone."""
    _, served = built_in()
    known: dict[tuple[int, ...], Tensor] = {}
    compared = 0
    for seed in range(cases):
        case = _Interleaved(served, seed)
        case.run(10)
        for number, prompt in case.prompts.items():
            found = torch.stack(case.logits[number])
            assert torch.equal(found, _alone(served, prompt, len(found), known)), (seed, number)
            compared += len(found)
    assert compared > 5 * cases


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_neighbours_change_no_bit_of_wrapped_models(family: str) -> None:
    _, served = wrapped(family, torch.bfloat16)
    known: dict[tuple[int, ...], Tensor] = {}
    for seed in range(4):
        case = _Interleaved(served, seed)
        case.run(10)
        for number, prompt in case.prompts.items():
            found = torch.stack(case.logits[number])
            assert torch.equal(found, _alone(served, prompt, len(found), known)), (seed, number)


DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (7, 3, 12, 1, 5, 20, 9, 2)  # gpt-oss has a window of 16


@pytest.mark.parametrize("dtype", DTYPES, ids=("fp32", "bf16"))
@pytest.mark.parametrize("family", FAMILIES)
def test_same_bits_as_generate(family: str, dtype: torch.dtype) -> None:
    plain, served = wrapped(family, dtype)
    prompts = drawn(LENGTHS)
    for batch in (prompts[:1], prompts):
        found = greedy(served.runner(BatchRunner), batch, 5)
        for (tokens, logits), (expected, bits) in zip(found, generated(plain, batch, 5), strict=True):
            assert tokens == expected
            assert torch.equal(logits, bits)
    together = greedy(served.runner(InvariantRunner), prompts[:4], 4)
    for prompt, (tokens, logits) in zip(prompts[:4], together, strict=True):
        ((expected, bits),) = generated(plain, [prompt], 4)
        assert tokens == expected
        assert torch.equal(logits, bits)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_joined_between_steps(family: str) -> None:
    """Sequences that join one under way, in another batch and with other padding: what they get alone, within rounding."""
    plain, served = wrapped(family)
    prompts = drawn((5, 9, 3))
    runner = served.runner(BatchRunner)
    found = {number: [logits_V] for number, logits_V in runner.join(prompts[:1]).items()}
    for waiting in ([], [prompts[1], prompts[2]], [], []):
        tokens = {number: int(each[-1].argmax()) for number, each in found.items()}
        for number, logits_V in runner.step(tokens).items():
            found[number].append(logits_V)
        found.update({number: [logits_V] for number, logits_V in runner.join(waiting).items()})
    assert runner.numbers == tuple(found)
    for prompt, logits in zip(prompts, found.values(), strict=True):
        ((expected, bits),) = generated(plain, [prompt], len(logits))
        assert [int(each.argmax()) for each in logits] == expected
        torch.testing.assert_close(torch.stack(logits), bits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_next"])
def test_leaving_changes_nobody(family: str) -> None:
    """A row that leaves takes its columns of padding along; the others go on as they would have, within rounding."""
    plain, served = wrapped(family)
    prompts = drawn((20, 4, 6))
    runner = served.runner(BatchRunner)
    found = {number: [logits_V] for number, logits_V in runner.join(prompts).items()}
    for leaving in (None, 0, None):
        if leaving is not None:
            runner.leave(leaving)
        tokens = {number: int(found[number][-1].argmax()) for number in runner.numbers}
        for number, logits_V in runner.step(tokens).items():
            found[number].append(logits_V)
    for number in (1, 2):
        ((expected, bits),) = generated(plain, [prompts[number]], 4)
        assert [int(each.argmax()) for each in found[number]] == expected
        torch.testing.assert_close(torch.stack(found[number]), bits, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("kind", [BatchRunner, InvariantRunner])
def test_each_sequence_is_guessed_as_it_is_alone(
    listened: tuple[Served, Listener], kind: type[BatchRunner], monkeypatch: pytest.MonkeyPatch
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
            runner.step({joined: token})
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
