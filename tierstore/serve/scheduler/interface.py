"""What the scheduler runs, and who watches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from tierstore.serve.batch.interface import BatchRunner
from tierstore.serve.text.language import Language


class Finish(Enum):
    """Why an answer ended, in OpenAI's words."""

    STOP = "stop"  # the model ended it, or a stop string did
    LENGTH = "length"  # its tokens are used up


class RequestOutcome(Enum):
    """How a request ended, as metrics count it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"  # its client left
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What a model's experts have cost since it was opened. ``moved_bytes``: by tier and direction (``nvme read``);
    ``stall_s``: by cause; ``pinned``: experts that are leased or pinned now.
    """

    hits: int = 0
    misses: int = 0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_s: Mapping[str, float] = field(default_factory=dict)
    pinned: int = 0


@dataclass(frozen=True, kw_only=True)
class Running:
    """A model that is open. ``context``: the most tokens of a sequence, prompt and answer. ``counts`` reads its counters; it
    is called by the thread that runs the model, between passes. ``lines`` describe it to people.
    """

    runner: BatchRunner
    language: Language
    context: int
    counts: Callable[[], Counts]
    lines: tuple[str, ...] = ()


class Watcher(Protocol):
    """Hears of passes and requests, from the thread that runs the model unless said otherwise."""

    def joined(self, *, sequences: int, tokens: int, seconds: float) -> None:
        """A prefill of ``tokens`` tokens of ``sequences`` prompts."""
        ...

    def stepped(self, *, sequences: int, seconds: float) -> None:
        """One token for each of ``sequences``."""
        ...

    def split_up(self) -> None:
        """A pass of several sequences has failed, and each is computed on its own."""
        ...

    def token(self, *, first: bool, seconds: float) -> None:
        """A token of an answer: ``seconds`` since its request came, or since its last token."""
        ...

    def ended(self, outcome: RequestOutcome) -> None:
        """A request has ended."""
        ...
