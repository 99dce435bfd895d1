"""Which token follows, chosen by the logits. Numbers are drawn per request: a seed gives the same text in any batch.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tierstore.errors import ConfigError
from tierstore.hf.packages import transformers
from tierstore.moe.seeds import keyed_generator

#: transformers' processors, in its order, by the key of generation_config.json that asks for them: the class, and what it is
#: made of. The first are before the temperature, the others behind top-p.
_PROCESSORS = {
    "no_repeat_ngram_size": ("NoRepeatNGramLogitsProcessor", "value"),
    "bad_words_ids": ("NoBadWordsLogitsProcessor", "value ends"),
    "min_length": ("MinLengthLogitsProcessor", "value ends"),
    "min_new_tokens": ("MinNewTokensLengthLogitsProcessor", "prompt value ends"),
    "exponential_decay_length_penalty": ("ExponentialDecayLengthPenalty", "value ends prompt"),
    "suppress_tokens": ("SuppressTokensLogitsProcessor", "value"),
    "begin_suppress_tokens": ("SuppressTokensAtBeginLogitsProcessor", "value prompt"),
}
_WARPERS = {
    "min_p": ("MinPLogitsWarper", "value"),
    "typical_p": ("TypicalLogitsWarper", "value"),
    "epsilon_cutoff": ("EpsilonLogitsWarper", "value"),
    "eta_cutoff": ("EtaLogitsWarper", "value"),
}
#: Those keys, and the keys that hold only where tokens are sampled.
PROCESSED = (*_PROCESSORS, *_WARPERS)
SAMPLED = ("temperature", "top_k", "top_p", *_WARPERS)
#: The values with which transformers does nothing.
_IDLE = dict.fromkeys(
    ("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff"), 0
)
_IDLE["typical_p"] = 1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a text is sampled, in the order of transformers' processors: the penalty, the temperature, top-k, top-p.

    ``temperature`` 0 takes the most probable token. ``top_k`` 0: of all tokens. ``repetition_penalty`` divides the logits of
    tokens that the text has, prompt and answer, where they are positive, and multiplies them where they are not (Keskar et
    al. 2019, "CTRL", section 4.1). ``processed``: values of the keys ``PROCESSED``, for transformers' own processors;
    ``ends``: the tokens that end a text, for them. ``seed`` None: a new one each time.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    processed: Mapping[str, Any] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature: expected at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"top_k: expected at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty: expected more than 0, got {self.repetition_penalty}")


class TokenSampler:
    """Chooses the tokens of one text, which begins with ``prompt``, one after another.

    What it gives depends on the options, the prompt and the logits, and on nothing else.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int] = ()) -> None:
        self._options = options
        seed = secrets.randbits(63) if options.seed is None else options.seed
        self._generator = keyed_generator(seed, "sample")
        #: Tokens that the text has, where they are penalised.
        self._present = set(prompt) if options.repetition_penalty != 1 else None
        self._tokens = list(prompt)
        self._processors = _make(_PROCESSORS, options, len(prompt))
        self._warpers = _make(_WARPERS, options, len(prompt))

    def __call__(self, logits_V: Tensor) -> int:
        """The next token. Raises ValueError for logits that are no numbers."""
        logits_V = logits_V.detach().float().cpu()
        if math.isnan(float(logits_V.max())):
            raise ValueError("the model's logits are not numbers")
        token = self._choose(self._applied(self._processors, self._penalised(logits_V)))
        if self._present is not None:
            self._present.add(token)
        self._tokens.append(token)
        return token

    def _choose(self, logits_V: Tensor) -> int:
        options = self._options
        if options.temperature == 0:
            return int(logits_V.argmax())
        most_probable = int(logits_V.argmax())
        logits_V = logits_V / options.temperature
        if not math.isfinite(
            float(logits_V.max())
        ):  # a temperature, or a penalty, so low that one token is left
            return most_probable
        if 0 < options.top_k < logits_V.numel():
            least = logits_V.topk(options.top_k).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -math.inf)
        probability_V = logits_V.softmax(dim=-1)
        if options.top_p < 1:
            probability_V = _nucleus(probability_V, options.top_p)
        if self._warpers:
            probability_V = self._applied(self._warpers, probability_V.log()).softmax(dim=-1)
        return int(torch.multinomial(probability_V, 1, generator=self._generator))

    def _applied(self, processors: Sequence[Callable[[Tensor, Tensor], Tensor]], logits_V: Tensor) -> Tensor:
        if not processors:
            return logits_V
        tokens, logits = torch.tensor([self._tokens], dtype=torch.long), logits_V[None]
        for processor in processors:
            logits = processor(tokens, logits)
        return logits[0]

    def _penalised(self, logits_V: Tensor) -> Tensor:
        if not self._present:
            return logits_V
        present = torch.tensor(sorted(self._present))
        found = logits_V[present]
        penalty = self._options.repetition_penalty
        return logits_V.index_put((present,), torch.where(found > 0, found / penalty, found * penalty))


def _make(table: Mapping[str, tuple[str, str]], options: SamplingOptions, prompt: int) -> list[Any]:
    """The processors of ``table`` for a prompt of ``prompt`` tokens."""
    made = []
    for key, (name, arguments) in table.items():
        value = options.processed.get(key)
        # transformers has one of the two: the latter takes the place of the former
        covered = key == "min_length" and "min_new_tokens" in options.processed
        if value is None or value == _IDLE.get(key) or covered:
            continue
        given = {
            "value": value,
            "prompt": prompt,
            "ends": torch.tensor(sorted(options.ends), dtype=torch.long),
        }
        made.append(getattr(transformers(), name)(*map(given.__getitem__, arguments.split())))
    return made


def _nucleus(probability_V: Tensor, top_p: float) -> Tensor:
    """The fewest tokens, the most probable first, that have ``top_p`` together; the others get 0."""
    ordered_V, token_V = probability_V.sort(descending=True, stable=True)
    before_V = ordered_V.cumsum(dim=0) - ordered_V
    dropped_V = before_V >= top_p
    dropped_V[0] = False  # in fp32 a tiny ``top_p`` is 0
    ordered_V = ordered_V.masked_fill(dropped_V, 0.0)
    return torch.zeros_like(probability_V).index_put((token_V,), ordered_V)
