"""Continue texts with a batch runner, starting each when the batch has room: what ``tierstore generate`` runs.

::

    generator = TextGenerator(runner, end_tokens=language.end_tokens, added=show)
    generator.run(texts := [GeneratedText(...), ...])
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from torch import Tensor

from tierstore.errors import ConfigError
from tierstore.serve.batch import BatchRunner
from tierstore.serve.language import StreamedText
from tierstore.serve.sampling import TokenSampler


class Ending(Enum):
    """Why a text ended."""

    END = "end"  # at an end-of-sequence token
    STOP = "stop"  # at a stop string
    LENGTH = "length"  # at its limit of tokens, or the model's context
    INTERRUPTED = "interrupted"


@dataclass(slots=True, eq=False)
class GeneratedText:
    """A text to continue by at most ``most`` tokens after ``prompt``, and its result. ``sampler`` chooses the tokens,
    ``stream`` decodes them.

    ``reasoning``: what the model wrote besides the answer ``text``. ``first_s``: seconds from the start of the run to the
    first token. Raises ConfigError.
    """

    prompt: Sequence[int]
    most: int
    sampler: TokenSampler
    stream: StreamedText
    _: KW_ONLY
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    ending: Ending = Ending.INTERRUPTED
    first_s: float | None = None

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"max_tokens: expected at least 1, got {self.most}")


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
        """Tokens per second."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second, over all sequences."""
        return self.decode_tokens / self.decode_s if self.decode_s else None


class TextGenerator:
    """Continues texts with ``runner``. ``added`` receives a text's index and its new piece; ``stopped`` is called before
    each pass, and True ends the run.
    """

    def __init__(
        self,
        runner: BatchRunner,
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
        self._begun_s = 0.0
        #: Texts in the batch and their indices, by the runner's numbers.
        self._running: dict[int, tuple[int, GeneratedText]] = {}

    def run(self, texts: Sequence[GeneratedText]) -> None:
        """Continue ``texts`` until all have ended; when ``stopped``, interrupt the others.

        Raises BudgetError for a prompt that is longer than the model's context, and what a pass raises.
        """
        self._begun_s = time.monotonic()
        waiting = deque(enumerate(texts))
        while (waiting or self._running) and not self._stopped():
            free = self._runner.sequences - len(self._running)
            joining = [waiting.popleft() for _ in range(min(free, len(waiting)))]
            if joining:
                self._join(joining)
            else:
                self._step()
        for number, (_, text) in list(self._running.items()):
            self._end(number, Ending.INTERRUPTED, text.stream.finish())

    def _join(self, joining: Sequence[tuple[int, GeneratedText]]) -> None:
        begun = time.monotonic()
        joined = self._runner.join([text.prompt for _, text in joining])
        self.totals.prefill_s += time.monotonic() - begun
        self.totals.prefill_tokens += sum(len(text.prompt) for _, text in joining)
        for indexed, (number, logits_V) in zip(joining, joined.items(), strict=True):
            self._running[number] = indexed
            self._advance(number, logits_V)

    def _step(self) -> None:
        tokens = {number: text.tokens[-1] for number, (_, text) in self._running.items()}
        begun = time.monotonic()
        logits = self._runner.step(tokens)
        self.totals.decode_s += time.monotonic() - begun
        self.totals.decode_tokens += len(tokens)
        self.totals.steps += 1
        for number, logits_V in logits.items():
            self._advance(number, logits_V)

    def _advance(self, number: int, logits_V: Tensor) -> None:
        """Choose the next token of a sequence."""
        index, text = self._running[number]
        token = text.sampler(logits_V)
        if text.first_s is None:
            text.first_s = time.monotonic() - self._begun_s
        if token in self._end_tokens:
            self._end(number, Ending.END, text.stream.finish())
            return
        text.tokens.append(token)
        piece = text.stream.push(token)
        if text.stream.stopped:
            self._end(number, Ending.STOP, piece)
        elif (
            len(text.tokens) == text.most or len(text.prompt) + len(text.tokens) > self._runner.model.context
        ):
            self._end(number, Ending.LENGTH, piece + text.stream.finish())
        else:
            self._add(index, text, piece)

    def _end(self, number: int, ending: Ending, piece: str) -> None:
        index, text = self._running.pop(number)
        text.ending = Ending.STOP if text.stream.stopped else ending  # the held text may have a stop string
        text.reasoning = text.stream.reasoning()
        self._add(index, text, piece)
        self._runner.leave(number)

    def _add(self, index: int, text: GeneratedText, piece: str) -> None:
        if piece:
            text.text += piece
            self._added(index, piece)
