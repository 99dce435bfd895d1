"""How long passes take, measured, and what follows for a client that was refused."""

from __future__ import annotations

import math

_WEIGHT = 0.1  # of the newest measurement
_LONGEST_S = 600


class Rates:
    """Seconds of a decoding pass, and of a token of a prompt: decayed means, 0 before the first pass."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prompt_token_s = 0.0

    def stepped(self, seconds: float) -> None:
        """A decoding pass took ``seconds``."""
        self.step_s = _mean(self.step_s, seconds)

    def joined(self, tokens: int, seconds: float) -> None:
        """A prefill of ``tokens`` tokens took ``seconds``."""
        self.prompt_token_s = _mean(self.prompt_token_s, seconds / tokens)

    def retry_after_s(self, *, steps: int, prompt_tokens: int) -> int:
        """Whole seconds until ``steps`` passes and ``prompt_tokens`` of prefill are done; 1 to 600."""
        seconds = steps * self.step_s + prompt_tokens * self.prompt_token_s
        return min(max(math.ceil(seconds), 1), _LONGEST_S)


def _mean(before: float, now: float) -> float:
    return now if before == 0 else before + _WEIGHT * (now - before)
