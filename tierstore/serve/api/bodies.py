"""Bodies of requests: each value of its type and range, or refused by name in OpenAI's shape."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tierstore.serve.sampling import SamplingOptions
from tierstore.units import is_unicode

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told instead of an answer. ``param`` is the field that is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """The object that is sent."""
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def bad(param: str, message: str) -> ApiError:
    """A field that cannot be served: 400. ``message`` goes on after the field's name."""
    return ApiError(400, f"{param}: {message}", param=param)


_SHOWN = 40  # characters of a value in a message
#: Fields that are not offered: which values change nothing, and why others are refused.
Neutral = Mapping[str, tuple[Callable[[object], bool], str]]
NOT_OFFERED = "is not offered by this server"


def one_of(*values: object) -> Callable[[object], bool]:
    """Accepts these values; without any, none. A boolean is no number."""
    return lambda value: any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in values
    )


def any_of(kind: type) -> Callable[[object], bool]:
    """Accepts every value of ``kind``."""
    return lambda value: isinstance(value, kind)


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object of a request. Raises ApiError for anything else."""
    try:
        value = json.loads(body, parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {shown(str(error), most=120)}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {kind(value)}")
    return value


def _not_json(text: str) -> object:
    raise ValueError(f"{text} is no JSON number")


def kind(value: object) -> str:
    """What JSON calls its type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


def shown(value: object, *, most: int = _SHOWN) -> str:
    """A value in a message: short, printable, on one line."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= most else f"{text[:most]}..."


class Fields:
    """The fields of an object: each is taken once, and ``done`` refuses what nobody took. Null is as if left out."""

    def __init__(self, values: dict[str, object], *, path: str = "") -> None:
        self._left = {name: value for name, value in values.items() if value is not None}
        self._path = path

    def name(self, field: str) -> str:
        """Where a field is: ``messages[0].role``."""
        return f"{self._path}{field}"

    def take(self, field: str) -> object:
        """A value of any type; None where there is none."""
        return self._left.pop(field, None)

    def text(self, field: str) -> str | None:
        """A string."""
        value = self.take(field)
        return None if value is None else as_text(value, self.name(field))

    def flag(self, field: str) -> bool:
        """A boolean; False where there is none."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise bad(self.name(field), f"expected a boolean, got {kind(value)}")
        return bool(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        """A whole number from ``low`` to ``high``."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad(self.name(field), f"expected a whole number, got {_numeric(value)}")
        if not low <= value <= high:
            raise bad(self.name(field), f"expected {low} to {high}, got {shown(value)}")
        return value

    def number(self, field: str, low: float, high: float) -> float | None:
        """A number from ``low`` to ``high``."""
        value = self.take(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad(self.name(field), f"expected a number, got {kind(value)}")
        if not low <= value <= high or not math.isfinite(value):
            raise bad(self.name(field), f"expected {low:g} to {high:g}, got {shown(value)}")
        return float(value)

    def inner(self, field: str) -> Fields | None:
        """An object."""
        value = self.take(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise bad(self.name(field), f"expected an object, got {kind(value)}")
        return Fields(value, path=f"{self.name(field)}.")

    def neutral(self, table: Neutral) -> None:
        """Fields that are not offered: each is accepted where it changes nothing, and refused by its reason elsewhere."""
        for field, (accepted, reason) in table.items():
            value = self.take(field)
            if value is not None and not accepted(value):
                raise bad(self.name(field), reason)

    def done(self) -> None:
        """Refuses what is left."""
        for field in self._left:
            raise bad(shown(self.name(field)), "is no field of this request")


def _numeric(value: object) -> str:
    return shown(value) if isinstance(value, float) else kind(value)


def as_text(value: object, name: str) -> str:
    """A string that is text: lone surrogates, which JSON can write, are not."""
    if not isinstance(value, str):
        raise bad(name, f"expected a string, got {kind(value)}")
    if not is_unicode(value):
        raise bad(name, "holds half of a surrogate pair, which is no character")
    return value


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


_MOST_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_NO_TOOLS = "tools are not offered by this server"
_A_STRING = "expected a string"
_NEUTRAL_COMPLETION: Neutral = {
    "best_of": (one_of(1), NOT_OFFERED),
    "echo": (one_of(False), "an echo of the prompt is not offered by this server"),
    "suffix": (one_of(""), NOT_OFFERED),
}
_NEUTRAL_CHAT: Neutral = {
    "audio": (one_of(), NOT_OFFERED),
    "function_call": (one_of("none", "auto"), _NO_TOOLS),
    "functions": (one_of([]), "functions are not offered by this server"),
    "metadata": (any_of(dict), "expected an object"),
    "modalities": (one_of(["text"]), "only text is offered"),
    "moderation": (one_of(), NOT_OFFERED),
    "parallel_tool_calls": (any_of(bool), "expected a boolean"),
    "prediction": (one_of(), NOT_OFFERED),
    "prompt_cache_key": (any_of(str), _A_STRING),
    "prompt_cache_options": (any_of(dict), "expected an object"),
    "prompt_cache_retention": (any_of(str), _A_STRING),
    "reasoning_effort": (one_of(), NOT_OFFERED),
    "safety_identifier": (any_of(str), _A_STRING),
    "service_tier": (one_of("auto", "default"), "other tiers are not offered by this server"),
    "store": (one_of(False), "stored answers are not offered by this server"),
    "tool_choice": (one_of("none", "auto"), _NO_TOOLS),
    "tools": (one_of([]), _NO_TOOLS),
    "verbosity": (one_of("medium"), NOT_OFFERED),
    "web_search_options": (one_of(), NOT_OFFERED),
}
#: ``type`` is what older versions of lm-eval send; ``annotations`` come with the messages of answers.
_NEUTRAL_MESSAGE: Neutral = {
    "annotations": (one_of([]), "annotations are not offered by this server"),
    "audio": (one_of(), "audio is not offered by this server"),
    "function_call": (one_of([]), _NO_TOOLS),
    "name": (any_of(str), _A_STRING),
    "refusal": (any_of(str), _A_STRING),
    "tool_calls": (one_of([]), _NO_TOOLS),
    "type": (one_of("text"), "only text is offered"),
}
_NEUTRAL_PART: Neutral = {"prompt_cache_breakpoint": (any_of(dict), "expected an object")}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request. One of the three: ``text``, ``tokens`` or ``messages``. ``model``: the name that it gives."""

    model: str
    parameters: Parameters
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, str], ...] | None = None

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        return "prompt" if self.messages is None else "messages"


def completion_call(body: dict[str, object]) -> Call:
    """A body of /v1/completions. Raises ApiError."""
    fields = Fields(body)
    model = _model(fields)
    prompt = fields.take("prompt")
    fields.neutral(_NEUTRAL_COMPLETION)
    parameters = take_parameters(fields)
    fields.done()
    if prompt is None:
        raise bad("prompt", "is missing")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return Call(model=model, parameters=parameters, text=as_text(prompt, "prompt"))
    if not isinstance(prompt, list):
        raise bad("prompt", f"expected a string or an array of tokens, got {kind(prompt)}")
    if any(isinstance(one, str | list) for one in prompt):
        raise bad("prompt", "several prompts in one request are not offered: send as many requests")
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in prompt):
        raise bad("prompt", "expected an array of tokens, which are whole numbers from 0")
    return Call(model=model, parameters=parameters, tokens=tuple(prompt))


def chat_call(body: dict[str, object]) -> Call:
    """A body of /v1/chat/completions. Raises ApiError."""
    fields = Fields(body)
    model = _model(fields)
    messages = fields.take("messages")
    fields.neutral(_NEUTRAL_CHAT)
    if (shape := fields.inner("response_format")) is not None:
        given = shape.text("type")
        if given != "text":
            raise bad("response_format", f"only text is offered, got {shown(given)}")
        shape.done()
    parameters = take_parameters(fields, limit="max_completion_tokens")
    fields.done()
    if messages is None:
        raise bad("messages", "is missing")
    if not isinstance(messages, list):
        raise bad("messages", f"expected an array, got {kind(messages)}")
    if not 1 <= len(messages) <= _MOST_MESSAGES:
        raise bad("messages", f"expected 1 to {_MOST_MESSAGES} messages, got {len(messages)}")
    read = tuple(_message(one, f"messages[{number}]") for number, one in enumerate(messages))
    return Call(model=model, parameters=parameters, messages=read)


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if model is None:
        raise bad("model", "is missing")
    return model


def _message(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise bad(name, f"expected an object, got {kind(value)}")
    fields = Fields(value, path=f"{name}.")
    role = fields.text("role")
    if role is None:
        raise bad(f"{name}.role", "is missing")
    if role in ("tool", "function"):
        raise bad(f"{name}.role", "tools are not offered by this server")
    if role not in _ROLES:
        raise bad(f"{name}.role", f"expected one of {', '.join(_ROLES)}, got {shown(role)}")
    content, reasoning = fields.take("content"), fields.text("reasoning_content")
    fields.neutral(_NEUTRAL_MESSAGE)
    fields.done()
    if content is None and reasoning is not None:  # an answer that ended before there was more
        content = ""
    if content is None:
        raise bad(f"{name}.content", "is missing")
    if isinstance(content, list):
        text = "".join(_part(one, f"{name}.content[{number}]") for number, one in enumerate(content))
    else:
        text = as_text(content, f"{name}.content")
    thought = {} if reasoning is None else {"reasoning_content": reasoning}
    return {"role": _ROLES[role], "content": text, **thought}


def _part(value: object, name: str) -> str:
    if not isinstance(value, dict):
        raise bad(name, f"expected an object, got {kind(value)}")
    fields = Fields(value, path=f"{name}.")
    given = fields.text("type")
    if given is None:
        raise bad(f"{name}.type", "is missing")
    if given != "text":
        raise ApiError(400, f"{name}: only text is offered, got {shown(given)}", param=name)
    text = fields.text("text")
    fields.neutral(_NEUTRAL_PART)
    fields.done()
    if text is None:
        raise bad(f"{name}.text", "is missing")
    return text
