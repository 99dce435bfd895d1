"""Requests that cannot be served, each wrong by the way it is made."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

JSON = "application/json"
_ODD = (None, True, -1, 0.5, 1e308, "", "words", [], {}, [[]], [None])
_ODD += ({"a": [1, {"b": None}]}, "\ud800", 1 << 70)

#: Values of each field that are always wrong.
_WRONG: dict[str, tuple[object, ...]] = {
    "model": (5, True, [], {}, "other", "../etc/passwd", "\ud800", ""),
    "max_tokens": (0, -5, 1.5, "9", True, [], {}, 1 << 40),
    "temperature": (-0.1, 2.1, "hot", True, [], {}, 1e300),
    "top_p": (0, -1, 1.01, "1", False, []),
    "top_k": (-1, 2.5, "all", []),
    "seed": (1.5, "x", True, 1 << 64, [], {}),
    "stop": (5, True, {}, "", [""], ["a"] * 5, [None], ["x" * 300], [["a"]]),
    "stream": (1, "true", [], {}),
    "n": (0, 2, "1", True, 1.5),
    "logprobs": (True, 1, 5, "yes"),
    "logit_bias": ({"5": 1}, [], "x"),
    "presence_penalty": (0.1, "x", []),
    "frequency_penalty": (-2, {}),
    "user": (5, []),
    "stream_options": ({}, {"include_usage": True}, 5, []),
    "beams": (1, "x", [], {}),
    "üñí": (1,),
}
_WRONG_PROMPTS = (5, True, {}, "", [], ["a", "b"], [-1], [1.5], [True], [1 << 70], [None])
_WRONG_PROMPTS += ("\ud800", "word " * 20_000)
_WRONG_COMPLETIONS = {
    "suffix": ("x", 5),
    "echo": (True, 1),
    "best_of": (2, 0, "x"),
    "messages": ([],),
    "tools": ([],),
}
_WRONG_CHATS = {
    "tools": ([{"type": "function"}], "x", 5, {}),
    "tool_choice": ("auto", {}),
    "functions": ([{}], 1),
    "response_format": ({"type": "json_object"}, {"type": 5}, {}, "text", []),
    "modalities": (["audio"],),
    "max_completion_tokens": (0, "x", 1.5, 1 << 40),
    "prompt": ("x",),
    "store": (True, 1),
}
_WRONG_MESSAGES: tuple[object, ...] = (
    *(None, 5, "x", {}, [], ["x"], [None], [[]], [{}]),
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": 5, "content": "x"}],
    [{"role": "emperor", "content": "x"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"type": "text"}}],
    [{"role": "user", "content": [5]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    [{"role": "user", "content": [{"type": "input_audio"}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [{"role": "user", "content": "x", "colour": "red"}],
    [{"role": "user", "content": "\udfff"}],
    [{"role": "user", "content": "word " * 20_000}],
)


@dataclass(frozen=True)
class Malformed:
    """A request, and the status that it is answered with."""

    method: str
    path: str
    content: bytes
    kind: str
    statuses: tuple[int, ...] = (400, 404)


def malformed(count: int, *, model: str, seed: int) -> Iterator[Malformed]:
    """``count`` requests, of all kinds in turns."""
    draw = random.Random(seed)
    kinds = (
        _wrong_field,
        _wrong_prompt,
        _wrong_messages,
        _cut,
        _noise,
        _not_an_object,
        _deep,
        _elsewhere,
        _not_json,
    )
    for number in range(count):
        yield kinds[number % len(kinds)](draw, model)


def _body(draw: random.Random, model: str, *, chat: bool) -> dict[str, object]:
    body: dict[str, object] = {"model": model, "max_tokens": draw.randint(1, 4)}
    if chat:
        body["messages"] = [
            {"role": "user", "content": draw.choice(("Hello", "é漢", "x" * draw.randint(1, 50)))}
        ]
    else:
        body["prompt"] = draw.choice(("Once upon", "é漢", "x" * draw.randint(1, 50)))
    if draw.random() < 0.3:
        body["temperature"] = draw.random()
    return body


def _request(body: object, *, chat: bool) -> Malformed:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return Malformed("POST", path, json.dumps(body).encode(), JSON)


def _wrong_field(draw: random.Random, model: str) -> Malformed:
    chat = draw.random() < 0.5
    wrong = {**_WRONG, **(_WRONG_CHATS if chat else _WRONG_COMPLETIONS)}
    field = draw.choice(sorted(wrong))
    body = _body(draw, model, chat=chat) | {field: draw.choice(wrong[field])}
    return _request(body, chat=chat)


def _wrong_prompt(draw: random.Random, model: str) -> Malformed:
    return _request(_body(draw, model, chat=False) | {"prompt": draw.choice(_WRONG_PROMPTS)}, chat=False)


def _wrong_messages(draw: random.Random, model: str) -> Malformed:
    return _request(_body(draw, model, chat=True) | {"messages": draw.choice(_WRONG_MESSAGES)}, chat=True)


def _cut(draw: random.Random, model: str) -> Malformed:
    chat = draw.random() < 0.5
    whole = _request(_body(draw, model, chat=chat), chat=chat)
    return Malformed("POST", whole.path, whole.content[: draw.randrange(len(whole.content))], JSON)


def _noise(draw: random.Random, model: str) -> Malformed:
    return Malformed("POST", "/v1/completions", b"\x00" + draw.randbytes(draw.randint(0, 400)), JSON)


def _not_an_object(draw: random.Random, model: str) -> Malformed:
    value = draw.choice([one for one in _ODD if not isinstance(one, dict)])
    return Malformed("POST", "/v1/chat/completions", json.dumps(value).encode(), JSON)


def _deep(draw: random.Random, model: str) -> Malformed:
    opening = draw.choice((b"[", b'{"a":')) * draw.choice((10, 1000, 200_000))
    return Malformed("POST", "/v1/completions", b'{"model":' + opening, JSON)


def _elsewhere(draw: random.Random, model: str) -> Malformed:
    method = draw.choice(("GET", "PUT", "DELETE", "PATCH"))
    path = draw.choice(
        ("/v1/completions", "/v1/chat/completions", "/v1/nothing", "/v2/completions", "/%00", "/v1/models/x")
    )
    return Malformed(method, path, b"", JSON, (404, 405))


def _not_json(draw: random.Random, model: str) -> Malformed:
    kind = draw.choice(
        ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "")
    )
    whole = _request(_body(draw, model, chat=False), chat=False)
    return Malformed("POST", whole.path, whole.content, kind, (415,))
