"""Texts continued by a batch runner, one after another as there is room: what ``tierstore generate`` runs.

::

    generator = TextGenerator(runner, end_tokens=language.end_tokens, added=show)
    texts = generator.run([TextRequest(...), ...])
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from tierstore.errors import ConfigError
from tierstore.serve.batch import GroupedRunner
from tierstore.serve.language import StreamedText
from tierstore.serve.sampling import TokenSampler


class Ending(Enum):
    """Why a text ended."""

    END = "end"  # the model ended it
    STOP = "stop"  # a stop string did
    LENGTH = "length"  # its tokens, or the model's context, are used up
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """At most ``most`` tokens behind ``prompt``, chosen by ``sampler``, made text by ``text``."""

    prompt: Sequence[int]
    most: int
    sampler: TokenSampler
    text: StreamedText

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {self.most}")


@dataclass(slots=True, eq=False)
class GeneratedText:
    """What became of a request. ``reasoning``: what the model wrote beside the answer ``text``. ``first_s``: seconds from
    its start to its first token.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    ending: Ending = Ending.INTERRUPTED
    first_s: float | None = None


@dataclass(slots=True)
class GenerationTotals:
    """Tokens and seconds of the passes so far."""

    prefill_tokens: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_s: float = 0.0
    steps: int = 0

    @property
    def prefill_rate(self) -> float | None:
        """Tokens a second."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second, of all sequences."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


@dataclass(slots=True, eq=False)
class _Running:
    request: TextRequest
    made: GeneratedText
    index: int
    begun_s: float


class TextGenerator:
    """Runs requests through ``runner``. ``added`` hears of each piece of text: the number of its request, and the piece.
    ``stopped``: asked before each pass whether to end.
    """

    def __init__(
        self,
        runner: GroupedRunner,
        *,
        end_tokens: frozenset[int],
        added: Callable[[int, str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self.totals = GenerationTotals()
        self._runner = runner
        self._end_tokens = end_tokens
        self._added = added
        self._stopped = stopped
        self._running: dict[int, _Running] = {}

    def run(self, requests: Sequence[TextRequest]) -> list[GeneratedText]:
        """The texts, in the order of their requests; those that were under way when it was ``stopped`` are interrupted.

        Raises BudgetError for a prompt that is longer than the model's context, and what a pass raises.
        """
        texts = [GeneratedText() for _ in requests]
        begun_s = time.monotonic()
        waiting = deque(
            _Running(request, made, index, begun_s)
            for index, (request, made) in enumerate(zip(requests, texts, strict=True))
        )
        while (waiting or self._running) and not self._stopped():
            room = self._runner.sequences - len(self._running)
            joining = [waiting.popleft() for _ in range(min(room, len(waiting)))]
            if joining:
                self._join(joining)
            elif self._running:
                self._step()
        for number in list(self._running):
            each = self._running[number]
            self._end(number, Ending.INTERRUPTED, each.request.text.finish())
        return texts

    def _join(self, joining: Sequence[_Running]) -> None:
        begun = time.monotonic()
        joined = self._runner.join([each.request.prompt for each in joining])
        self.totals.prefill_s += time.monotonic() - begun
        self.totals.prefill_tokens += sum(len(each.request.prompt) for each in joining)
        for each, start in zip(joining, joined, strict=True):
            self._running[start.number] = each
            self._advance(start.number, start.logits_V)

    def _step(self) -> None:
        tokens = {number: each.made.tokens[-1] for number, each in self._running.items()}
        begun = time.monotonic()
        logits = self._runner.step(tokens)
        self.totals.decode_s += time.monotonic() - begun
        self.totals.decode_tokens += len(tokens)
        self.totals.steps += 1
        for number, logits_V in logits.items():
            self._advance(number, logits_V)

    def _advance(self, number: int, logits_V: Tensor) -> None:
        """Takes the next token of a sequence."""
        each = self._running[number]
        request, made = each.request, each.made
        token = request.sampler(logits_V)
        if made.first_s is None:
            made.first_s = time.monotonic() - each.begun_s
        if token in self._end_tokens:
            self._end(number, Ending.END, request.text.finish())
            return
        made.tokens.append(token)
        piece = request.text.push(token)
        if request.text.stopped:
            self._end(number, Ending.STOP, piece)
        elif (
            len(made.tokens) == request.most
            or len(request.prompt) + len(made.tokens) > self._runner.model.context
        ):
            self._end(number, Ending.LENGTH, piece + request.text.finish())
        else:
            self._add(each, piece)

    def _end(self, number: int, ending: Ending, piece: str) -> None:
        each = self._running.pop(number)
        each.made.ending = Ending.STOP if each.request.text.stopped else ending  # also in what was held
        each.made.reasoning = each.request.text.reasoning()
        self._add(each, piece)
        self._runner.leave(number)

    def _add(self, each: _Running, piece: str) -> None:
        if piece:
            each.made.text += piece
            self._added(each.index, piece)
