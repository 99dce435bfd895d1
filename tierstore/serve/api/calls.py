"""Bodies of requests for answers: what is asked, still as text."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.serve.api.errors import ApiError, bad
from tierstore.serve.api.fields import NOT_OFFERED, Fields, Neutral, any_of, as_text, kind, one_of, shown
from tierstore.serve.api.parameters import Parameters, take_parameters

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
