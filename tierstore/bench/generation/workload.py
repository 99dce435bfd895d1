"""What is generated: prompts of random tokens, and random tokens that follow them whatever the model would choose.

A random model's own choices repeat themselves, and a model's repetitions flatter every cache. So tokens are forced where the
library lets us; the choice that the model would have made is computed all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tierstore.bench.checks import at_least
from tierstore.errors import ConfigError

_FIRST_TOKEN = 3  # below are the usual special ones


@dataclass(frozen=True, kw_only=True)
class GenerationWorkload:
    """``batch`` sequences of ``prompt_tokens``, each continued by ``new_tokens``. Raises ConfigError."""

    batch: int
    prompt_tokens: int
    new_tokens: int
    vocabulary: int
    seed: int = 7

    def __post_init__(self) -> None:
        at_least(1, batch=self.batch, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)
        if self.vocabulary <= _FIRST_TOKEN:
            raise ConfigError(f"vocabulary: expected more than {_FIRST_TOKEN}, got {self.vocabulary}")

    def prompts(self) -> list[list[int]]:
        """The tokens of each sequence's prompt."""
        prompts: list[list[int]] = self._drawn()[:, : self.prompt_tokens].tolist()
        return prompts

    def forced(self) -> list[list[int]]:
        """The tokens of each step, one of each sequence."""
        steps: list[list[int]] = self._drawn()[:, self.prompt_tokens :].T.tolist()
        return steps

    def _drawn(self) -> NDArray[np.int64]:
        random = np.random.default_rng(self.seed)
        shape = (self.batch, self.prompt_tokens + self.new_tokens)
        return random.integers(_FIRST_TOKEN, self.vocabulary, shape)

    def as_json(self) -> dict[str, int]:
        """The inverse of ``GenerationWorkload(**..)``."""
        return asdict(self)


def vocabulary_of(config: Mapping[str, Any]) -> int:
    """The tokens of a model's configuration. Raises ConfigError where it does not say."""
    for table in (config, config.get("text_config") or {}):
        if "vocab_size" in table:
            return int(table["vocab_size"])
    raise ConfigError("config.json: vocab_size: missing")
