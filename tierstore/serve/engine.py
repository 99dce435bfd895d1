"""Continuous batching: requests join the batch, get one token in each step, and leave.

One thread opens the model, runs it and closes it; no other thread uses it. Between two steps there is at most one
prefill, of ``limits.prefill_tokens`` tokens or one prompt, so running answers continue while prompts come in.

A pass that fails removes all of its sequences from the batch. Each is then computed again alone, from its prompt and its
tokens so far (``BatchRunner.resume``): those that fail again end with the error, and the others continue. On several ranks
a failed pass ends all of them, and the engine with PeerError.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from tierstore.errors import BudgetError, PeerError, TierstoreError
from tierstore.machine import MemoryAccount
from tierstore.serve.admission import GenerationRequest, RequestOutcome, RequestQueue, Update
from tierstore.serve.batch import BatchRunner
from tierstore.serve.config import LimitsConfig
from tierstore.serve.language import Language

if TYPE_CHECKING:  # it imports this module, and a package that only a server needs
    from tierstore.serve.api.metrics import ServerMetrics


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """Counters of a model's experts since it was opened. ``moved_bytes``: by tier and direction (``nvme read``);
    ``stall_s``: by cause; ``pinned``: experts that are leased or pinned now. ``mapped``: leases in mapped files, which
    are neither hits nor misses, of ``mapped_bytes``.
    """

    hits: int = 0
    misses: int = 0
    mapped: int = 0
    mapped_bytes: int = 0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_s: Mapping[str, float] = field(default_factory=dict)
    pinned: int = 0


@dataclass(frozen=True, kw_only=True)
class Running:
    """An open model. ``context``: the most tokens of a sequence, prompt and answer. ``counts`` reads the model's counters;
    only the model's thread calls it, between passes. ``account``: what the process will hold. ``lines``: a description to
    print.
    """

    runner: BatchRunner
    language: Language
    context: int
    counts: Callable[[], ModelCounts]
    account: MemoryAccount
    lines: tuple[str, ...] = ()
    #: Seconds without requests after which the engine calls ``runner.idle``. None: never.
    idle_s: float | None = None


_WEIGHT = 0.1  # of the newest measurement
_LONGEST_RETRY_S = 600
_SHUT_DOWN = "the server was shut down before the answer was complete"


def _mean(before: float, now: float) -> float:
    """An exponentially decaying mean; ``before`` is 0 at the first measurement."""
    return now if before == 0 else before + _WEIGHT * (now - before)


_COUNTS_EVERY_S = 0.5


def _print(line: str) -> None:
    print(line, file=sys.stderr)


class ServingEngine:
    """Runs a model on a thread of its own. ``opened`` opens the model on that thread; ``sequences``: most sequences of the
    batch; ``metrics`` counts passes and requests; ``log`` receives lines to print.

    A context manager: entering starts to open the model; leaving ends all requests, and raises what opening or running the
    model raised. The event loop calls ``submit`` and ``cancel``.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Running]],
        *,
        sequences: int,
        limits: LimitsConfig,
        metrics: ServerMetrics,
        log: Callable[[str], None] = _print,
    ) -> None:
        self._open = opened
        self._log = log
        self._sequences = sequences
        self._metrics = metrics
        #: Mean seconds of a decode step, and of a prompt token in a prefill.
        self._step_s = self._prompt_token_s = 0.0
        self.queue = RequestQueue(limits, self._retry_after_s)
        self._batch: dict[int, GenerationRequest] = {}  # by the runner's numbers; owned by the model's thread
        self._tokens_left = 0  # most tokens that the batch's answers still get; the model's thread writes it
        self._running: Running | None = None
        self._error: BaseException | None = None
        #: The model's counters, read between passes about every 0.5 s; after the end, the final ones.
        self.counts = ModelCounts()
        self._counted_s = float("-inf")
        self._thread = threading.Thread(target=self._serve, name="tierstore-engine")

    def __enter__(self) -> ServingEngine:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._thread.join()
        if self._error is not None and error[0] is None:
            raise self._error

    @property
    def opened(self) -> bool:
        """Whether the model has been opened."""
        return self._running is not None

    @property
    def running(self) -> Running:
        """The open model. Other threads must not use its ``runner`` or call its ``counts``."""
        assert self._running is not None
        return self._running

    @property
    def active(self) -> int:
        """Sequences in the batch."""
        return len(self._batch)

    @property
    def alive(self) -> bool:
        """Whether the model's thread is running: it opens the model, or serves requests."""
        return self._thread.is_alive()

    def submit(self, request: GenerationRequest) -> GenerationRequest:
        """Accept a request. Raises RefusedError or ClosingError."""
        self.queue.add(request)
        return request

    def cancel(self, request: GenerationRequest, outcome: RequestOutcome = RequestOutcome.CANCELLED) -> None:
        """Cancel a request whose client left: it leaves the queue at once, or the batch before the next step."""
        if request.settle():
            request.cancelled = True
            self.queue.remove(request)
            self._metrics.ended(outcome)

    def drain(self) -> None:
        """Accept no more requests. The thread ends after the last one."""
        self.queue.drain()

    def close(self) -> None:
        """End all requests after the current pass."""
        for request in self.queue.close():
            self._fail(request, _SHUT_DOWN)

    def _retry_after_s(self) -> int:
        """Estimated seconds until the requests in the batch and the queue are served; 1 to ``_LONGEST_RETRY_S``."""
        prompt_tokens = self.queue.prompt_tokens()
        answers = self.queue.tokens - prompt_tokens + self._tokens_left
        seconds = -(-answers // self._sequences) * self._step_s + prompt_tokens * self._prompt_token_s
        return min(max(math.ceil(seconds), 1), _LONGEST_RETRY_S)

    # The methods below run on the model's thread.

    def _serve(self) -> None:
        try:
            with self._open() as running:
                self._count(running)
                self._running = running
                while self._batch or self.queue.wait(running.idle_s):
                    self._turn(running)
                self._counted_s = float("-inf")
                self._count(running)
        except BaseException as error:  # __exit__ raises it again
            self._error = error
        finally:
            for request in [*self._batch.values(), *self.queue.close()]:
                self._fail(request, _SHUT_DOWN)
            self._batch.clear()

    def _turn(self, running: Running) -> None:
        """Run a prefill, if a request waits and the batch is not full, and a decode step."""
        for number, request in list(self._batch.items()):
            if request.cancelled:
                self._leave(running, number)
            elif self.queue.closed:
                self._leave(running, number)
                self._fail(request, _SHUT_DOWN)
        if taken := self.queue.take(self._sequences - len(self._batch)):
            self._join(running, taken)
        if self._batch:
            self._step(running)
        elif running.idle_s is not None:
            running.runner.idle()
        self._tokens_left = sum(one.max_tokens - len(one.tokens) for one in self._batch.values())
        self._count(running)

    def _join(self, running: Running, taken: list[GenerationRequest]) -> None:
        begun = time.monotonic()
        prompts = [request.prompt for request in taken]
        try:
            joined = running.runner.join(prompts)
        except PeerError:
            raise
        except BudgetError as error:
            if len(taken) > 1 or self._batch:  # retry with fewer, or when a sequence has left
                self.queue.give_back(taken[1:] if not self._batch else taken)
                if not self._batch:
                    self._split_up("prefill", len(taken), error)
                    self._join(running, taken[:1])
            else:
                self._fail_by(taken[0], error)
            return
        except Exception as error:
            if len(taken) == 1:
                self._fail_by(taken[0], error)
            else:
                self._split_up("prefill", len(taken), error)
                for request in taken:
                    self._join(running, [request])
            return
        seconds = time.monotonic() - begun
        tokens = sum(map(len, prompts))
        self._prompt_token_s = _mean(self._prompt_token_s, seconds / tokens)
        self._metrics.joined(tokens=tokens, seconds=seconds)
        for request, (number, logits_V) in zip(taken, joined.items(), strict=True):
            self._batch[number] = request
            self._advance(running, number, logits_V)

    def _step(self, running: Running) -> None:
        begun = time.monotonic()
        tokens = {number: request.tokens[-1] for number, request in self._batch.items()}
        try:
            logits = running.runner.step(tokens)
        except PeerError:
            raise
        except Exception as error:  # by BatchRunner's contract, all sequences of the pass have left
            failed = list(self._batch.values())
            self._batch.clear()
            if len(failed) == 1:
                self._fail_by(failed[0], error)
            else:
                self._split_up("step", len(failed), error)
                self._join_again(running, failed)
            return
        seconds = time.monotonic() - begun
        self._step_s = _mean(self._step_s, seconds)
        self._metrics.stepped(sequences=len(tokens), seconds=seconds)
        for number, logits_V in logits.items():
            self._advance(running, number, logits_V)

    def _split_up(self, what: str, sequences: int, error: Exception) -> None:
        """Report that a pass failed and each sequence is computed alone, which is far slower if it happens each time."""
        reason = self._reason(error)
        self._log(f"a {what} of {sequences} sequences failed; computing each alone: {reason}")
        self._metrics.split_up()

    def _join_again(self, running: Running, failed: list[GenerationRequest]) -> None:
        """Compute each sequence of a failed pass again, alone."""
        for request in failed:
            if request.cancelled:
                continue
            try:
                number, logits_V = running.runner.resume(request.prompt, request.tokens)
            except Exception as error:
                self._fail_by(request, error)
            else:
                self._batch[number] = request
                self._advance(running, number, logits_V)

    def _advance(self, running: Running, number: int, logits_V: Tensor) -> None:
        """Choose the next token of a sequence."""
        request = self._batch[number]
        try:
            token = request.sampler(logits_V)
            ends = token in running.language.end_tokens | request.stop_tokens
            last = len(request.tokens) + 1 == request.max_tokens
            text = "" if ends else request.text.push(token)
            if ends or last:
                text += request.text.finish()  # the held text may have a stop string
            stopped = ends or request.text.stopped
            finish = RequestOutcome.STOP if stopped else RequestOutcome.LENGTH if last else None
        except Exception as error:  # for example logits that are NaN; other requests continue
            self._leave(running, number)
            self._fail_by(request, error)
            return
        now = time.monotonic()
        self._metrics.token(first=not request.tokens, seconds=now - request.last_s)
        request.last_s = now
        request.tokens.append(token)
        if finish is not None:
            self._leave(running, number)
            if request.settle():
                self._metrics.ended(finish)
        request.put(Update(text, len(request.tokens), finish, request.text.reasoning()))

    def _leave(self, running: Running, number: int) -> None:
        del self._batch[number]
        running.runner.leave(number)

    def _fail(self, request: GenerationRequest, message: str) -> None:
        if request.settle():
            self._metrics.ended(RequestOutcome.FAILED)
        request.fail(message)

    def _fail_by(self, request: GenerationRequest, error: Exception) -> None:
        self._fail(request, f"the answer could not be computed: {self._reason(error)}")

    def _count(self, running: Running) -> None:
        now = time.monotonic()
        if now - self._counted_s >= _COUNTS_EVERY_S:
            self._counted_s = now
            self.counts = running.counts()

    def _reason(self, error: Exception) -> str:
        """``error`` in one line. Logs the traceback of an unexpected error."""
        if not isinstance(error, TierstoreError | OSError):
            self._log("".join(traceback.format_exception(error)).rstrip())
            return type(error).__name__
        return " ".join(str(error).split())
