"""The server over the fake model, asked by OpenAI's own client."""

import json
from collections.abc import Iterator

import httpx
import openai
import openai.types.chat
import pytest
from fake_model import BROKEN_LATER, BROKEN_PROMPT, CONTEXT, REFUSED_CHAT, chat_text, expected
from fake_server import MODEL, Fake, serving
from malformed import malformed
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from refusals import refuses

from tierstore.serve.api.bodies import ChatBody, parse_body


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with serving() as fake:
        yield fake


@pytest.fixture(scope="module")
def client(fake: Fake) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain(fake: Fake) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake.url) as plain:
        yield plain


def test_a_completion_worked_by_hand(client: openai.OpenAI) -> None:
    # "ab": (97 * 31 + 98 + 2) % 70 = 27 -> FOLLOWS[27] = "w"; "bw": (98 * 31 + 119 + 3) % 70 = 10 -> "a".
    answer = client.completions.create(model=MODEL, prompt="ab", max_tokens=2, temperature=0)
    assert answer.choices[0].text == expected("ab", 2)[0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        2,
        2,
        4,
    )


@pytest.mark.parametrize("prompt", ["Once", "漢字 and more", "x" * 90])
def test_streaming_gives_what_the_whole_answer_is(client: openai.OpenAI, prompt: str) -> None:
    text, finish, tokens = expected(prompt, 60)
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=60, temperature=0)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, finish)
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=60,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [finish]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == tokens
    assert len({chunk.id for chunk in (*chunks, last)}) == 1


def test_a_chat(client: openai.OpenAI) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]},
    ]
    prompt = chat_text(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
    )
    text, finish, tokens = expected(prompt, 30)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_completion_tokens=30,
        temperature=0,  # type: ignore[arg-type]
    )
    assert whole.object == "chat.completion"
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", text)
    assert whole.choices[0].finish_reason == finish
    assert whole.usage.completion_tokens == tokens
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=30,
            temperature=0,
            stream=True,  # type: ignore[arg-type]
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == finish
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_a_stop_string_ends_the_answer_before_it(client: openai.OpenAI) -> None:
    text = expected("Once", 80)[0]
    stop = text[20:24]
    until = text[: text.index(stop)]
    answer = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=80, temperature=0, stop=["\0", stop]
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (until, "stop")
    stream = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=80, temperature=0, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == until


def test_a_seed_gives_the_answer_again(client: openai.OpenAI) -> None:
    def answer(seed: int) -> str:
        made = client.completions.create(model=MODEL, prompt="Once", max_tokens=40, temperature=2, seed=seed)
        return made.choices[0].text

    assert answer(5) == answer(5)
    assert answer(5) != answer(6)


def test_a_prompt_of_tokens(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=[79, 110, 99, 101], max_tokens=9, temperature=0)
    assert answer.choices[0].text == expected("Once", 9)[0]


def test_the_bytes_of_a_stream(plain: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 3, "temperature": 0, "stream": True}
    answer = plain.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["object"] == "text_completion" for event in events)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tierstore"
    with refuses(openai.NotFoundError, "'other'"):
        client.models.retrieve("other")


@pytest.mark.parametrize("prompt", [f"a{BROKEN_PROMPT}", f"a{BROKEN_LATER}bc"])
def test_a_corrupt_record_ends_the_request_and_not_the_server(client: openai.OpenAI, prompt: str) -> None:
    with refuses(openai.InternalServerError, "layer 1, expert 5"):
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0)
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0, stream=True)
    with refuses(openai.APIError, "layer 1, expert 5"):
        list(stream)
    assert client.completions.create(model=MODEL, prompt="Once", max_tokens=9, temperature=0).choices[0].text


CHAT = [{"role": "user", "content": "Hello"}]
#: Path, fields besides the model, and the field that is refused.
REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("completions", {}, "prompt"),
    ("completions", {"prompt": 5}, "prompt"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": ["a", "b"]}, "prompt"),
    ("completions", {"prompt": [1, -1]}, "prompt"),
    ("completions", {"prompt": [1, 999]}, "prompt"),
    ("completions", {"prompt": "\ud800"}, "prompt"),
    ("completions", {"prompt": "x" * CONTEXT}, "prompt"),
    ("completions", {"prompt": "x", "max_tokens": CONTEXT}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 2.5}, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": True}, "max_tokens"),
    ("completions", {"prompt": "x", "temperature": 3}, "temperature"),
    ("completions", {"prompt": "x", "temperature": "hot"}, "temperature"),
    ("completions", {"prompt": "x", "top_p": 0}, "top_p"),
    ("completions", {"prompt": "x", "seed": 1 << 80}, "seed"),
    ("completions", {"prompt": "x", "n": 2}, "n"),
    ("completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
    ("completions", {"prompt": "x", "echo": True}, "echo"),
    ("completions", {"prompt": "x", "logprobs": 3}, "logprobs"),
    ("completions", {"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    ("completions", {"prompt": "x", "presence_penalty": 0.5}, "presence_penalty"),
    ("completions", {"prompt": "x", "stop": ""}, "stop"),
    ("completions", {"prompt": "x", "stop": list("abcde")}, "stop"),
    ("completions", {"prompt": "x", "stop": {"a": 1}}, "stop"),
    ("completions", {"prompt": "x", "stream": "yes"}, "stream"),
    ("completions", {"prompt": "x", "stream_options": {}}, "stream_options"),
    ("completions", {"prompt": "x", "beams": 3}, "beams"),
    ("chat/completions", {}, "messages"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": ["hi"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    ("chat/completions", {"messages": [{"role": "user", "content": REFUSED_CHAT}]}, "messages"),
    ("chat/completions", {"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"messages": CHAT, "tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"messages": CHAT, "logprobs": True}, "logprobs"),
    (
        "chat/completions",
        {"messages": CHAT, "max_tokens": 3, "max_completion_tokens": 4},
        "max_completion_tokens",
    ),
]


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED)
def test_what_is_refused(plain: httpx.Client, path: str, fields: dict[str, object], param: str) -> None:
    body = json.dumps({"model": MODEL, **fields}).encode()
    answer = plain.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{param}: ")
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


#: What is offered, and values of other fields that change nothing (a field without any is only refused).
OFFERED = {
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "seed",
    "stop",
}
NEUTRAL: dict[str, list[object]] = {
    "audio": [],
    "best_of": [1],
    "echo": [False],
    "frequency_penalty": [0, 0.0],
    "function_call": ["none"],
    "functions": [[]],
    "logit_bias": [{}],
    "logprobs": [False],
    "metadata": [{}, {"run": "5"}],
    "modalities": [["text"]],
    "moderation": [],
    "n": [1],
    "parallel_tool_calls": [True, False],
    "prediction": [],
    "presence_penalty": [0],
    "prompt_cache_key": ["key"],
    "prompt_cache_options": [{}],
    "prompt_cache_retention": ["24h"],
    "reasoning_effort": [],
    "response_format": [{"type": "text"}],
    "safety_identifier": ["me"],
    "service_tier": ["auto", "default"],
    "store": [False],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "top_logprobs": [0],
    "user": ["me"],
    "verbosity": ["medium"],
    "web_search_options": [],
}
MESSAGE_NEUTRAL: dict[str, list[object]] = {
    "annotations": [[]],
    "audio": [],
    "function_call": [],
    "name": ["me"],
    "refusal": ["no"],
    "tool_calls": [[]],
    "type": ["text"],
}
#: No field takes it.
WRONG = {"type": "?", "what": [1]}


def _params(kind: str) -> list[str]:
    """Every field of OpenAI's requests, by its own client."""
    params = chat_params if kind == "chat/completions" else completion_params
    return sorted({*params.CompletionCreateParamsBase.__annotations__} - OFFERED - {"stream_options"})


def _answered(plain: httpx.Client, path: str, **fields: object) -> httpx.Response:
    asked = {"messages": CHAT} if path == "chat/completions" else {"prompt": "Once"}
    body = {"model": MODEL, "max_tokens": 2, "temperature": 0, **asked, **fields}
    return plain.post(f"/v1/{path}", json=body)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_every_field_of_openai_is_accepted_where_it_changes_nothing(plain: httpx.Client, path: str) -> None:
    """And refused by its name elsewhere. Null is as if left out."""
    expected = _answered(plain, path).json()["choices"]
    for name in _params(path):
        for value in (None, *NEUTRAL[name]):
            answer = _answered(plain, path, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert answer.json()["choices"] == expected
        if name != "metadata" and not name.startswith("prompt_cache_options"):
            error = _answered(plain, path, **{name: WRONG}).json()["error"]
            assert error["message"].startswith(f"{name}"), (name, error)
            assert error["param"].partition(".")[0] == name
            assert "unknown field" not in error["message"]


def test_every_field_of_a_message_is_accepted_where_it_changes_nothing(plain: httpx.Client) -> None:
    """Those that OpenAI's client knows of messages that are sent and answered, and what older programs send."""
    sent = {
        name
        for kind in ("System", "Developer", "User", "Assistant")
        for name in getattr(openai.types.chat, f"ChatCompletion{kind}MessageParam").__annotations__
    }
    names = {*sent, *openai.types.chat.ChatCompletionMessage.model_fields, "type"} - {"role", "content"}
    for name in sorted(names):
        for value in (None, *MESSAGE_NEUTRAL[name]):
            messages = [*CHAT, {"role": "assistant", "content": "Hi", name: value}, *CHAT]
            answer = _answered(plain, "chat/completions", messages=messages)
            assert answer.status_code == 200, (name, value, answer.text)
            plainly = [*CHAT, {"role": "assistant", "content": "Hi"}, *CHAT]
            assert (
                answer.json()["choices"]
                == _answered(plain, "chat/completions", messages=plainly).json()["choices"]
            )
        error = _answered(plain, "chat/completions", messages=[{**CHAT[0], name: WRONG}]).json()["error"]
        assert error["param"] == f"messages[0].{name}"
        assert "unknown field" not in error["message"]


def test_an_answer_is_sent_back_as_history(plain: httpx.Client, client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3)  # type: ignore[arg-type]
    message = first.choices[0].message.model_dump()
    raw = _answered(plain, "chat/completions").json()["choices"][0]["message"]
    for one in (message, raw, {"role": "assistant", "content": None, "reasoning_content": "so"}):
        answer = _answered(plain, "chat/completions", messages=[*CHAT, one, *CHAT])
        assert answer.status_code == 200, answer.text
    part = {"type": "text", "text": "Hello", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert (
        _answered(plain, "chat/completions", messages=[{"role": "user", "content": [part]}]).status_code
        == 200
    )


def test_reasoning_goes_to_the_template() -> None:
    messages = [{"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}]
    body = parse_body(ChatBody, json.dumps({"model": MODEL, "messages": messages}).encode())
    assert [message.spoken() for message in body.messages] == messages


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b'{"model": NaN}', "the body is not JSON: NaN is not a JSON number"),
        (b"\xff\xfe{}", "the body is not"),
        (b"[1]", "the body must be a JSON object, got [1]"),
        (b'{"model":' + b"[" * 100_000, "the body is"),
        (b'{"model": "fake", "prompt": "x", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON"),
        (
            b'{"model": "fake", "prompt": "x", "temperature": 1e999}',
            "temperature: input should be a finite number",
        ),
    ],
)
def test_bodies_that_are_no_request(plain: httpx.Client, content: bytes, message: str) -> None:
    answer = plain.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)


def test_other_statuses(plain: httpx.Client) -> None:
    def status(method: str, path: str, **given: object) -> tuple[int, str]:
        answer = plain.request(method, path, **given)  # type: ignore[arg-type]
        return answer.status_code, answer.json()["error"]["message"]

    assert status("GET", "/nothing") == (404, "unknown path /nothing")
    assert status("GET", "/v1/completions") == (405, "GET is not allowed for this path")
    body = {"model": "other", "prompt": "x"}
    assert status("POST", "/v1/completions", json=body) == (
        404,
        "unknown model 'other': this server serves 'fake'",
    )
    assert status("POST", "/v1/completions", content=b"{}")[0] == 415
    large = {"model": MODEL, "prompt": "x" * (5 << 20)}
    assert status("POST", "/v1/completions", json=large) == (413, f"the body is larger than {4 << 20} bytes")

    def parts() -> Iterator[bytes]:  # without Content-Length
        for _ in range(80):
            yield b" " * (1 << 16)

    answer = httpx.post(
        f"{plain.base_url}/v1/completions", content=parts(), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 413


def test_health_and_metrics(plain: httpx.Client, client: openai.OpenAI) -> None:
    client.completions.create(model=MODEL, prompt="Once", max_tokens=5, temperature=0)
    assert plain.get("/health").json() == {"status": "ok"}
    shown = {
        name: float(value)
        for name, value in (
            line.rsplit(" ", 1) for line in plain.get("/metrics").text.splitlines() if line[0] != "#"
        )
    }
    assert shown["tierstore_generated_tokens_total"] >= 5
    assert shown['tierstore_requests_total{outcome="length"}'] >= 1
    assert shown["tierstore_time_to_first_token_seconds_count"] >= 1
    assert shown["tierstore_inter_token_seconds_count"] >= 4
    assert shown["tierstore_expert_hits_total"] == 3
    assert shown['tierstore_moved_bytes_total{tier="nvme read"}'] == 4096
    assert shown['tierstore_stall_seconds_total{cause="demand read"}'] == 0.5
    assert shown["tierstore_queue_requests"] == shown["tierstore_batch_sequences"] == 0
    assert shown["tierstore_resident_memory_bytes"] > 1 << 20
    assert shown["tierstore_open_descriptors"] > 3


def test_the_page_needs_nothing_from_elsewhere(plain: httpx.Client) -> None:
    answer = plain.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text
    for path in ("/v1/models", "/v1/completions", "/v1/chat/completions"):
        assert f'"{path}"' in answer.text


@pytest.mark.slow
def test_each_is_refused_with_a_sentence() -> None:
    with serving() as fake, httpx.Client(base_url=fake.url) as client:
        for number, request in enumerate(malformed(270, model=MODEL, seed=7)):
            answer = client.request(
                request.method, request.path, content=request.content, headers={"Content-Type": request.kind}
            )
            assert answer.status_code in request.statuses, (number, request, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            message = error["message"]
            assert 5 < len(message) < 300, (request, message)
            assert message.isprintable(), (request, message)
        assert fake.runner.passes == []
        assert client.get("/health").status_code == 200
