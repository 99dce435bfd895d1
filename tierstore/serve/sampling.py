"""Choose the next token from logits, and read a model's generation_config.json.

Shapes: V vocabulary. Each request has its own random generator, so what a seed draws does not depend on the batch.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tierstore.config import check_least, check_positive
from tierstore.errors import ConfigError
from tierstore.hf.describing import CONFIG_NAME, read_config, transformers
from tierstore.hf.spec import HfSpec
from tierstore.moe.seeds import keyed_generator

#: transformers' processors, in its order, by their key in generation_config.json: the class and its arguments. Processors
#: are applied before the temperature, warpers after top-p.
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
#: The keys above, and the keys that apply only to sampling.
PROCESSED = (*_PROCESSORS, *_WARPERS)
SAMPLED = ("temperature", "top_k", "top_p", *_WARPERS)
#: The values with which a processor does nothing.
_IDLE = dict.fromkeys(
    ("no_repeat_ngram_size", "min_length", "min_new_tokens", "epsilon_cutoff", "eta_cutoff"), 0
)
_IDLE["typical_p"] = 1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a text is sampled, in the order of transformers' processors: penalty, temperature, top-k, top-p.

    ``temperature`` 0 takes the most probable token. ``top_k`` 0 keeps all tokens. ``repetition_penalty`` divides the
    positive logits, and multiplies the negative ones, of tokens that occur in the prompt or the answer (Keskar et al. 2019,
    "CTRL", section 4.1). ``processed`` (values of the keys ``PROCESSED``) and ``ends`` (end-of-sequence tokens) are for
    transformers' processors. ``seed`` None: a random seed for each text.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    processed: Mapping[str, Any] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    seed: int | None = None

    def __post_init__(self) -> None:
        check_least(self, 0, "temperature", "top_k")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        check_positive(self, "repetition_penalty")


class TokenSampler:
    """Chooses the tokens of one text, which begins with ``prompt``, one after another.

    With a seed, the choice depends only on the options, the prompt and the logits.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int] = ()) -> None:
        self._options = options
        seed = secrets.randbits(63) if options.seed is None else options.seed
        self._generator = keyed_generator(seed, "sample")
        #: Tokens that occur in the text; None without a penalty.
        self._present = set(prompt) if options.repetition_penalty != 1 else None
        self._tokens = list(prompt)
        self._processors = _make(_PROCESSORS, options, len(prompt))
        self._warpers = _make(_WARPERS, options, len(prompt))

    def __call__(self, logits_V: Tensor) -> int:
        """The next token. Raises ValueError for logits that are not numbers."""
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
        ):  # the temperature or the penalty is so low that one token is left
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
    """Create the processors of ``table`` that ``options`` enables, for a prompt of ``prompt`` tokens."""
    made = []
    for key, (name, arguments) in table.items():
        value = options.processed.get(key)
        # as in transformers, min_new_tokens replaces min_length
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
    """Keep the fewest most probable tokens whose probabilities sum to ``top_p``; set all others to 0."""
    ordered_V, token_V = probability_V.sort(descending=True, stable=True)
    before_V = ordered_V.cumsum(dim=0) - ordered_V
    dropped_V = before_V >= top_p
    dropped_V[0] = False  # in fp32 a tiny ``top_p`` is 0
    ordered_V = ordered_V.masked_fill(dropped_V, 0.0)
    return torch.zeros_like(probability_V).index_put((token_V,), ordered_V)


# generation_config.json -------------------------------------------------------------------------------------

#: The file with a model's defaults for sampling and its end-of-sequence tokens.
GENERATION_NAME = "generation_config.json"
_TOP_K = 50  # transformers' default
#: Keys that are applied, or that do not affect the text.
_READ = {
    *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", *PROCESSED, "stop_strings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "renormalize_logits"),
    *("use_cache", "return_dict_in_generate", "transformers_version"),
}
#: Values with which these keys do not affect the text either.
_UNUSED = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "length_penalty"), 1),
    **dict.fromkeys(("guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "diversity_penalty", "penalty_alpha"), 0),
    "max_length": 20,
}
_SHOWN = 40  # characters of a value in a message


def generation_defaults(spec: HfSpec) -> tuple[SamplingOptions, list[str], list[str]]:
    """A model's defaults: sampling options with end-of-sequence tokens, stop strings, and lines about what cannot be read or
    is not applied.

    Reads generation_config.json; if it is missing or cannot be read, config.json, as for older models. Raises ConfigError
    naming the file and the key.
    """
    where, lines, values = (spec.directory or Path()) / GENERATION_NAME, [], None
    if spec.directory is not None and where.exists():
        try:
            values = read_config(where)
        except ConfigError as error:
            lines = [f"{error}; ignored"]
    if values is None:
        keys = transformers().GenerationConfig().to_dict()
        where, values = (
            where.with_name(CONFIG_NAME),
            {key: value for key, value in spec.config.items() if key in keys},
        )
    stop = _several(values.get("stop_strings"))
    if not all(isinstance(text, str) and text for text in stop):
        raise ConfigError(
            f"{where}: stop_strings: expected a string or a list, got {values['stop_strings']!r}"
        )
    found = values.get("eos_token_id", spec.config.get("eos_token_id"))
    ends = _several(found)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ends):
        raise ConfigError(f"{spec.directory}: eos_token_id: expected a token or a list, got {found!r}")
    defaults = sampling_defaults(values, where=str(where), vocabulary=spec.vocab_size, ends=frozenset(ends))
    return defaults, stop, [*lines, *not_applied(values, where=where.name)]


def _several(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [] if found is None else [found]


def sampling_defaults(
    values: Mapping[str, Any], *, where: str, vocabulary: int = 2, ends: frozenset[int] = frozenset()
) -> SamplingOptions:
    """The sampling options in a generation_config.json. As in transformers, tokens are sampled only if ``do_sample`` is set,
    and ``top_k`` is 50 by default.

    Raises ConfigError naming ``where`` and the key.
    """
    samples = bool(values.get("do_sample"))
    processed = {key: values[key] for key in PROCESSED if values.get(key) is not None}
    try:
        # Processors check their values when they are created, and when first used.
        for key, value in processed.items():
            try:
                TokenSampler(SamplingOptions(processed={key: value}, ends=ends), [0])(torch.zeros(vocabulary))
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
        return SamplingOptions(
            temperature=_number(values, "temperature") if samples else 0.0,
            top_k=int(_number(values, "top_k", default=_TOP_K)),
            top_p=_number(values, "top_p"),
            repetition_penalty=_number(values, "repetition_penalty"),
            processed=processed,
            ends=ends,
        )
    except ConfigError as error:
        read = {key: value for key, value in values.items() if samples or key not in SAMPLED}
        if len(read) < len(values):  # without sampling, transformers ignores the other keys
            return sampling_defaults(read, where=where, vocabulary=vocabulary, ends=ends)
        raise ConfigError(f"{where}: {error}") from error


def not_applied(values: Mapping[str, Any], *, where: str) -> list[str]:
    """A line that names the settings of a generation_config.json that serving does not apply; none if it applies all."""
    left = [
        f"{key} = {json.dumps(value)[:_SHOWN]}"
        for key, value in values.items()
        if not (key in _READ or key.startswith(("output_", "_")) or value is None or value is False)
        and not (key in _UNUSED and value == _UNUSED[key])
    ]
    return [f"{where}: not applied: {', '.join(left)}"] if left else []


def _number(values: Mapping[str, Any], key: str, *, default: float = 1.0) -> float:
    value = values.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key}: expected a number, got {value!r}")
    return float(value)
