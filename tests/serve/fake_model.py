"""A model small enough to know by heart, for tests of the scheduler and the server.

Tokens are bytes, and 256, which ends an answer. What follows a text depends on its last two bytes: ``FOLLOWS[(a * 31 + b) %
len(FOLLOWS)]``, and the end after every 97th text length. ``expected(prompt, n)`` says what the greedy answer is.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tierstore.errors import BudgetError, ChecksumError, DataError
from tierstore.machine import MemoryAccount
from tierstore.serve.engine import ModelCounts, Running
from tierstore.serve.language import Language
from tierstore.serve.sampling import SamplingOptions

END = 256
CONTEXT = 512
FOLLOWS = "the model answers with words that follow each other, é and 漢 too. ".encode()
BROKEN_PROMPT, BROKEN_LATER = (
    "\x01",
    "\x02",
)  # a prompt with either meets a corrupt record, at once or on its third step
REFUSED_CHAT = "\x03"


def follows(sequence: Sequence[int]) -> int:
    """The token after ``sequence``."""
    if len(sequence) % 97 == 0:
        return END
    before, last = ([0, *sequence])[-2:]
    return FOLLOWS[(before * 31 + last + len(sequence)) % len(FOLLOWS)]


def expected(prompt: str, most: int) -> tuple[str, str, int]:
    """The greedy answer: its text, why it ends, and its tokens."""
    sequence = list(prompt.encode())
    first = len(sequence)
    while len(sequence) - first < most:
        token = follows(sequence)
        sequence.append(token)
        if token == END:
            text = bytes(sequence[first:-1]).decode(errors="replace")
            return text, "stop", len(sequence) - first
    return bytes(sequence[first:]).decode(errors="replace"), "length", most


class FakeRunner:
    """A BatchRunner of at most ``room`` sequences. Every pass takes ``pass_s`` seconds."""

    def __init__(self, *, room: int = 8, pass_s: float = 0.0) -> None:
        self._room = room
        self._pass_s = pass_s
        self._next = 0
        self._first: dict[int, int] = {}
        self.sequences: dict[int, list[int]] = {}
        self.passes: list[tuple[str, int]] = []  # what was done, with how many sequences

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self.sequences)

    def join(self, prompts: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        if len(self.sequences) + len(prompts) > self._room:
            raise BudgetError(f"room for {self._room} sequences")
        self._pass("join", [list(prompt) for prompt in prompts])
        joined = {}
        for prompt in prompts:
            self.sequences[self._next] = list(prompt)
            self._first[self._next] = len(prompt)
            joined[self._next] = self._logits(self._next)
            self._next += 1
        return joined

    def resume(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, Tensor]:
        (joined,) = self.join([[*prompt, *tokens]]).items()
        return joined

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        for number, token in tokens.items():
            self.sequences[number].append(token)
        try:
            self._pass("step", [self.sequences[number] for number in tokens])
        except ChecksumError:
            for number in tokens:
                self.leave(number)
            raise
        return {number: self._logits(number) for number in tokens}

    def leave(self, number: int) -> None:
        del self.sequences[number], self._first[number]

    def _pass(self, what: str, sequences: list[list[int]]) -> None:
        self.passes.append((what, len(sequences)))
        time.sleep(self._pass_s)
        for sequence in sequences:
            prompt = bytes(byte for byte in sequence if byte != END)
            later = prompt.find(BROKEN_LATER.encode())
            if BROKEN_PROMPT.encode() in prompt or 0 <= later <= len(prompt) - 6:
                raise ChecksumError("records-0.bin: the record of layer 1, expert 5 is corrupt")

    def _logits(self, number: int) -> Tensor:
        logits_V = torch.full((END + 1,), -4.0)
        logits_V[follows(self.sequences[number])] = 4.0
        return logits_V


class FakeLanguage(Language):
    """Bytes, and a chat template that writes roles."""

    def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        text = chat_text(messages)
        if REFUSED_CHAT in text:
            raise DataError("the chat template refuses these messages")
        return self.encode(text)


def chat_text(messages: Sequence[Mapping[str, object]]) -> str:
    """The prompt of a conversation."""
    return "".join(f"<{one['role']}>{one['content']}" for one in messages) + "<assistant>"


@contextmanager
def opened(runner: FakeRunner, *, context: int = CONTEXT) -> Iterator[Running]:
    """A model of ``runner``, open."""
    counts = ModelCounts(hits=3, misses=1, moved_bytes={"nvme read": 4096}, stall_s={"demand read": 0.5})
    language = FakeLanguage(
        vocabulary=END + 1, end_tokens=frozenset({END}), defaults=SamplingOptions(temperature=0)
    )
    account = MemoryAccount({"experts": 1 << 20})
    yield Running(runner=runner, language=language, context=context, counts=lambda: counts, account=account)
