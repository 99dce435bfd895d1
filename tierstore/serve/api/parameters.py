"""How an answer is sampled and when it stops; and what OpenAI's API has and this server does not offer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tierstore.serve.api.errors import bad
from tierstore.serve.api.fields import Fields, Neutral, any_of, as_text, kind, one_of
from tierstore.serve.text.sampling import SamplingOptions

_MOST_STOPS = 4
_LONGEST_STOP = 256
_MOST_TOKENS = 1 << 31
_SEEDS = 1 << 63

_NO_PENALTY = "penalties are not offered by this server"
_NO_LOGPROBS = "log probabilities are not offered by this server"

_NEUTRAL: Neutral = {
    "n": (one_of(1), "several choices are not offered: send as many requests"),
    "presence_penalty": (one_of(0), _NO_PENALTY),
    "frequency_penalty": (one_of(0), _NO_PENALTY),
    "logit_bias": (one_of({}), "biased tokens are not offered by this server"),
    "logprobs": (one_of(False), _NO_LOGPROBS),
    "top_logprobs": (one_of(0), _NO_LOGPROBS),
    "user": (any_of(str), "expected a string"),
}
_NEUTRAL_STREAM: Neutral = {
    "include_obfuscation": (one_of(False), "obfuscation is not offered by this server")
}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """``max_tokens``: None where the request names none. ``sampling``: the options of sampling that it names."""

    sampling: dict[str, float]
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_tokens: frozenset[int]
    stream: bool
    include_usage: bool

    def sampled(self, defaults: SamplingOptions) -> SamplingOptions:
        """``defaults`` with what the request says."""
        return replace(defaults, **self.sampling)  # type: ignore[arg-type]


def take_parameters(fields: Fields, *, limit: str = "max_tokens") -> Parameters:
    """The fields that both kinds of request have. ``limit`` names the one for ``max_tokens``."""
    fields.neutral(_NEUTRAL)
    stream = fields.flag("stream")
    return Parameters(
        sampling=_sampling(fields),
        max_tokens=_limit(fields, limit),
        stop=_stops(fields),
        stop_tokens=_stop_tokens(fields),
        stream=stream,
        include_usage=_usage(fields, stream),
    )


def _sampling(fields: Fields) -> dict[str, float]:
    """Also ``top_k`` and ``repetition_penalty``, which OpenAI's API does not have."""
    named = {
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.whole("top_k", 0, _MOST_TOKENS),
        "repetition_penalty": fields.number("repetition_penalty", 0, 10),
        "seed": fields.whole("seed", -_SEEDS, _SEEDS - 1),
    }
    for field in ("top_p", "repetition_penalty"):
        if named[field] == 0:
            raise bad(fields.name(field), "expected more than 0")
    return {field: value for field, value in named.items() if value is not None}


def _limit(fields: Fields, name: str) -> int | None:
    plain = fields.whole("max_tokens", 1, _MOST_TOKENS)
    if name == "max_tokens":
        return plain
    other = fields.whole(name, 1, _MOST_TOKENS)
    if plain is not None and other is not None and plain != other:
        raise bad(fields.name(name), "differs from max_tokens, and one of them is enough")
    return plain if other is None else other


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    name = fields.name("stop")
    listed = value if isinstance(value, list) else [value]
    if not isinstance(value, str | list):
        raise bad(name, f"expected a string or an array of strings, got {kind(value)}")
    if len(listed) > _MOST_STOPS:
        raise bad(name, f"expected at most {_MOST_STOPS} strings, got {len(listed)}")
    stops = tuple(as_text(one, name) for one in listed)
    for stop in stops:
        if not 1 <= len(stop) <= _LONGEST_STOP:
            raise bad(name, f"expected strings of 1 to {_LONGEST_STOP} characters, got one of {len(stop)}")
    return stops


def _stop_tokens(fields: Fields) -> frozenset[int]:
    value = fields.take("stop_token_ids")
    tokens = [] if value is None else value
    if not isinstance(tokens, list) or any(type(token) is not int or token < 0 for token in tokens):
        raise bad(
            fields.name("stop_token_ids"), "expected an array of tokens, which are whole numbers from 0"
        )
    return frozenset(tokens)


def _usage(fields: Fields, stream: bool) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad(fields.name("stream_options"), "is for requests with stream = true")
    included = options.flag("include_usage")
    options.neutral(_NEUTRAL_STREAM)
    options.done()
    return included
