"""Request bodies: pydantic validates each field, and errors name the field in OpenAI's format.

Unsupported fields are accepted if their value changes nothing. Null counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tierstore.serve.sampling import SamplingOptions
from tierstore.units import is_unicode

_KINDS = {
    401: "authentication_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_SHOWN = 40  # characters of a value in a message
_MOST_MESSAGES = 4096
_MOST_STOPS, _LONGEST_STOP = 4, 256
_MOST_TOKENS = 1 << 31
_SEEDS = 1 << 63
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
#: Messages that replace those of pydantic's that name its types.
_WORDS = {"extra_forbidden": "unknown field", "missing": "is missing", "model_type": "expected an object"}
#: Fields whose items are not named in errors.
_WHOLE = ("stop", "stop_token_ids", "prompt")
Body = TypeVar("Body", bound=BaseModel)


class ApiError(Exception):
    """A refusal: an HTTP status, and one sentence. ``param``: the field at fault."""

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
        """The JSON object to send."""
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def bad(param: str, message: str) -> ApiError:
    """Status 400 for a field. ``message`` follows the field's name."""
    return ApiError(400, f"{param}: {message}", param=param)


def shown(value: object, *, most: int = _SHOWN) -> str:
    """``value`` for a message: shortened, printable, on one line."""
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return text if len(text) <= most else f"{text[:most]}..."


def parse_body(kind: type[Body], content: bytes) -> Body:
    """Parse the request in ``content``. Raises ApiError naming the field."""
    try:
        value = json.loads(content, parse_constant=_not_json)
    except UnicodeDecodeError as error:
        raise ApiError(400, "the body is not UTF-8") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {shown(str(error), most=120)}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body must be a JSON object, got {shown(value)}")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from error


def _not_json(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


def _refusal(error: ValidationError) -> ApiError:
    """The first error that pydantic found."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    first, *rest = found["loc"] or ("body",)
    param = str(first)
    if param not in _WHOLE:
        param += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    message = _WORDS.get(found["type"], found["msg"][:1].lower() + found["msg"][1:])
    return bad(shown(param), message)


def _refused(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{text}", {"text": message})


def _only(*values: object, why: str = "is not supported by this server") -> PlainValidator:
    """An unsupported field: only ``values``, which change nothing, are accepted. A boolean does not equal a number."""

    def checked(value: object) -> object:
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            return value
        raise _refused(why)

    return PlainValidator(checked)


def _unicode(text: str) -> str:
    """Refuse lone surrogates, which JSON can write but which are not text."""
    if not is_unicode(text):
        raise _refused("contains half of a surrogate pair, which is not a character")
    return text


Text = Annotated[str, AfterValidator(_unicode)]


class _Object(BaseModel):
    """A JSON object that refuses unknown fields and ignores fields that are null."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


# Fields of both kinds of requests ---------------------------------------------------------------------------

_NO_PENALTY = "is not supported by this server, only repetition_penalty is"
_NO_LOGPROBS = "log probabilities are not supported by this server"


class _StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, _only(False, why="obfuscation is not supported here")] = False


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


_Stop = Annotated[Text, Field(min_length=1, max_length=_LONGEST_STOP)]


class RequestBody(_Object):
    """How an answer is sampled and when it stops. OpenAI has no ``top_k``, ``repetition_penalty`` and ``stop_token_ids``."""

    model: Text
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=_MOST_TOKENS)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    seed: int | None = Field(None, ge=-_SEEDS, lt=_SEEDS)
    stop: Annotated[list[_Stop], Field(max_length=_MOST_STOPS), BeforeValidator(_listed)] = []
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: Annotated[Any, _only(1, why="only one choice is supported; send several requests")] = 1
    presence_penalty: Annotated[Any, _only(0, why=_NO_PENALTY)] = 0
    frequency_penalty: Annotated[Any, _only(0, why=_NO_PENALTY)] = 0
    logit_bias: Annotated[Any, _only({}, why="biased tokens are not supported by this server")] = None
    logprobs: Annotated[Any, _only(False, why=_NO_LOGPROBS)] = False
    top_logprobs: Annotated[Any, _only(0, why=_NO_LOGPROBS)] = 0
    user: str | None = None

    @field_validator("stream_options")
    @classmethod
    def _streams(cls, value: _StreamOptions, info: ValidationInfo) -> _StreamOptions:
        if not info.data.get("stream"):
            raise _refused("requires stream = true")
        return value

    @property
    def prompt_field(self) -> str:
        """The name of the field that holds the prompt."""
        return "prompt"

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer; None if the request sets no limit."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether the events of the answer include token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampled(self, defaults: SamplingOptions) -> SamplingOptions:
        """``defaults``, overridden by the fields of the request."""
        names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(defaults, **given)


# Completions ------------------------------------------------------------------------------------------------


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, list):
        raise _refused("expected a string or an array of tokens")
    if any(isinstance(one, str | list) for one in value):
        raise _refused("only one prompt in a request is supported; send several requests")
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in value):
        raise _refused("expected an array of tokens (integers of at least 0)")
    return value


class CompletionBody(RequestBody):
    """A body of /v1/completions."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]
    best_of: Annotated[Any, _only(1)] = 1
    echo: Annotated[Any, _only(False, why="an echo of the prompt is not supported by this server")] = False
    suffix: Annotated[Any, _only("")] = ""


# Chats ------------------------------------------------------------------------------------------------------

_NO_TOOLS = "tools are not supported by this server"


class _TextOnly(_Object):
    """An object whose type must be text. The type is checked first, before fields that only other types have."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, values: Any) -> Any:
        if isinstance(values, dict) and isinstance(kind := values.get("type"), str) and kind != "text":
            raise _refused(f"only text is supported, got {shown(kind)}")
        return values


class _Part(_TextOnly):
    """A part of a message's content."""

    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = None


def _role(role: str) -> str:
    if role in ("tool", "function"):
        raise _refused(_NO_TOOLS)
    if role not in _ROLES:
        raise _refused(f"expected one of {', '.join(_ROLES)}, got {shown(role)}")
    return _ROLES[role]


class _Message(_Object):
    """A message of a chat. Older versions of lm-eval send ``type``; ``annotations`` come with the messages of answers."""

    role: Annotated[str, AfterValidator(_role)]
    reasoning_content: Text | None = None
    content: list[_Part] = Field(None, validate_default=True)
    annotations: Annotated[Any, _only([], why="annotations are not supported by this server")] = None
    audio: Annotated[Any, _only(why="audio is not supported by this server")] = None
    function_call: Annotated[Any, _only([], why=_NO_TOOLS)] = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[Any, _only([], why=_NO_TOOLS)] = None
    type: Annotated[Any, _only("text", why="only text is supported")] = None

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            return [{"type": "text", "text": _unicode(value)}]
        if value is None and info.data.get("reasoning_content") is None:
            raise _refused("is missing")
        return [] if value is None else value  # an answer that ended within its reasoning has no content

    def spoken(self) -> dict[str, str]:
        """The message as chat templates read it."""
        said = {"role": self.role, "content": "".join(part.text for part in self.content)}
        return (
            said if self.reasoning_content is None else {**said, "reasoning_content": self.reasoning_content}
        )


class ChatBody(RequestBody):
    """A body of /v1/chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1, max_length=_MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    response_format: _TextOnly | None = None
    audio: Annotated[Any, _only()] = None
    function_call: Annotated[Any, _only("none", "auto", why=_NO_TOOLS)] = None
    functions: Annotated[Any, _only([], why="functions are not supported by this server")] = None
    metadata: dict[str, Any] | None = None
    modalities: Annotated[Any, _only(["text"], why="only text is supported")] = None
    moderation: Annotated[Any, _only()] = None
    parallel_tool_calls: bool | None = None
    prediction: Annotated[Any, _only()] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: Annotated[Any, _only()] = None
    safety_identifier: str | None = None
    service_tier: Annotated[
        Any, _only("auto", "default", why="other tiers are not supported by this server")
    ] = None
    store: Annotated[Any, _only(False, why="stored answers are not supported by this server")] = None
    tool_choice: Annotated[Any, _only("none", "auto", why=_NO_TOOLS)] = None
    tools: Annotated[Any, _only([], why=_NO_TOOLS)] = None
    verbosity: Annotated[Any, _only("medium")] = None
    web_search_options: Annotated[Any, _only()] = None

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_limit(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("max_tokens") not in (None, value):
            raise _refused("differs from max_tokens; set only one of them")
        return value

    @property
    def prompt_field(self) -> str:
        return "messages"

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
