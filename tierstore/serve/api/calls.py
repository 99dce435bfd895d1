"""Bodies of requests for answers: what is asked, still as text."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.serve.api.errors import ApiError, bad
from tierstore.serve.api.fields import Fields, as_text, kind, shown
from tierstore.serve.api.parameters import Parameters, take_parameters

_MOST_MESSAGES = 4096
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

#: What OpenAI's API has besides, and this server does not.
_CHAT_ONLY = frozenset(
    {
        "audio",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "tool_choice",
        "tools",
        "verbosity",
        "web_search_options",
    }
)


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
    fields.neutral(
        "best_of", lambda value: value == 1 and not isinstance(value, bool), "is not offered by this server"
    )
    fields.neutral(
        "echo", lambda value: value is False, "an echo of the prompt is not offered by this server"
    )
    fields.neutral("suffix", lambda value: False, "is not offered by this server")
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
    fields.neutral("tools", lambda value: value == [], "tools are not offered by this server")
    fields.neutral("functions", lambda value: value == [], "functions are not offered by this server")
    fields.neutral("store", lambda value: value is False, "stored answers are not offered by this server")
    if (shape := fields.inner("response_format")) is not None:
        given = shape.text("type")
        if given != "text":
            raise bad("response_format", f"only text is offered, got {shown(given)}")
        shape.done()
    parameters = take_parameters(fields, limit="max_completion_tokens")
    fields.done(known=_CHAT_ONLY)
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
    content = fields.take("content")
    fields.neutral("name", lambda one: isinstance(one, str), "expected a string")
    for field in ("tool_calls", "function_call"):
        fields.neutral(field, lambda one: one == [], "tools are not offered by this server")
    fields.neutral("audio", lambda one: False, "audio is not offered by this server")
    fields.neutral("refusal", lambda one: isinstance(one, str), "expected a string")
    fields.done()
    if content is None:
        raise bad(f"{name}.content", "is missing")
    if isinstance(content, list):
        text = "".join(_part(one, f"{name}.content[{number}]") for number, one in enumerate(content))
    else:
        text = as_text(content, f"{name}.content")
    return {"role": _ROLES[role], "content": text}


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
    fields.done()
    if text is None:
        raise bad(f"{name}.text", "is missing")
    return text
