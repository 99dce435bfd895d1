"""What models of known tokens write, by ``tierstore generate`` and by the server: beside transformers' ``generate`` and
``decode``.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from fake_server import MODEL, serving
from served_stores import chain_store, serve_config
from small_tokenizers import MARKS, byte_level, sentencepiece

from tierstore.cli.main import cli
from tierstore.serve.opening import open_running


@dataclass
class _Chain:
    """transformers' own model and tokenizer; a store of them, and a server over it."""

    plain: Any
    tokenizer: Any
    store: Path
    client: httpx.Client
    lines: tuple[str, ...]

    def written(self, prompt: str, **options: Any) -> str:
        """What transformers adds to a prompt: text of all tokens less that of the prompt's."""
        tokens = self.tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = self.plain.generate(tokens, max_new_tokens=40, num_beams=1, **options)[0]
        before, whole = (self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (tokens[0], made))
        assert whole.startswith(before)
        return str(whole[len(before) :])

    def generate(self, *arguments: str) -> tuple[str, dict[str, Any]]:
        """What the command prints, and the one text that it made."""
        base = ["generate", str(self.store), "--host-budget", "64MiB", "--set", "threads=1", *arguments]
        base += ["--set", "io.huge_pages=off", "--max-tokens", "40"]
        shown, told = (
            CliRunner().invoke(cli, [*base, *more], standalone_mode=False) for more in ([], ["--json"])
        )
        assert shown.exception is None, shown.output
        return shown.output, json.loads(told.stdout.splitlines()[-1])["texts"][0]

    def ask(self, path: str, **fields: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """The choice of a whole answer, and all deltas of the same one streamed."""
        body = {"model": MODEL, "max_tokens": 40, **fields}
        whole = self.client.post(f"/v1/{path}", json=body)
        assert whole.status_code == 200, whole.text
        deltas: dict[str, str] = {}
        for line in self.client.post(f"/v1/{path}", json={**body, "stream": True}).text.split("\n\n")[:-2]:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            for name, value in choice.get("delta", {"text": choice.get("text", "")}).items():
                deltas[name] = deltas.get(name, "") + value
            finish = choice["finish_reason"]
        (choice,) = whole.json()["choices"]
        assert finish == choice["finish_reason"]
        return choice, deltas


def _opened(directory: Path, tokenizer: Any, *scripts: list[int], **generation: Any) -> Iterator[_Chain]:
    plain, store = chain_store(directory, tokenizer, scripts, generation=generation)
    with (
        serving(opened=lambda: open_running(serve_config(store, host_budget=64 << 20))) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield _Chain(plain, tokenizer, store, client, server.service.engine.running.lines)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Chain]:
    tokenizer = sentencepiece()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    known = tokenizer.convert_tokens_to_ids
    words = [
        "▁of",
        "▁France",
        "▁is",
        "▁Paris",
        "▁and",
        "▁London",
        "<|tool|>",
        "▁Hello",
        "▁world",
        "<|im_end|>",
        "!",
    ]
    emoji = [f"<0x{byte:02X}>" for byte in "🚗\u2028\t".encode()]
    scripts = (
        known([*words, "</s>"]),
        known(["v", "e", "r", "v"]),
        known(["▁a", *emoji, "▁b", "STO", "P", "▁do", "▁n", "'t", "</s>"]),
    )
    yield from _opened(
        tmp_path_factory.mktemp("words"), tokenizer, *scripts, no_repeat_ngram_size=2, num_beams=2
    )


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Chain]:
    """A model that goes on with its reasoning, as gpt-oss writes it, and answers."""
    tokenizer = byte_level(("<s>", "</s>", *MARKS))
    tokenizer.add_tokens(["assistant", "final", "Hello"])
    tokenizer.chat_template = (
        "<|start|>user<|message|>{{ messages[0].content }}<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>The user g"
    )
    header = ["<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
    tokens = tokenizer.convert_tokens_to_ids([*"grets", *header, "Hello", "!", "<|return|>"])
    yield from _opened(tmp_path_factory.mktemp("channels"), tokenizer, tokens, eos_token_id=tokens[-1:])


def test_the_text_of_all_tokens(words: _Chain) -> None:
    text = words.written("The capital of")
    assert text == " France is Paris and London Hello world!"
    shown, made = words.generate("--prompt", "The capital of")
    assert f"\n{text}\n" in shown
    assert "\ngeneration_config.json: not applied: num_beams = 2\n" in f"\n{shown}"
    assert (made["text"], made["ending"], made["reasoning"]) == (text, "end", "")
    choice, streamed = words.ask("completions", prompt="The capital of")
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    assert streamed == {"text": text}
    choice, streamed = words.ask("chat/completions", messages=[{"role": "user", "content": "The capital of"}])
    assert choice["message"]["content"] == streamed["content"] == text.strip()  # a text of its own
    assert "reasoning_content" not in {**choice["message"], **streamed}


def test_generation_config(words: _Chain) -> None:
    """No pair of tokens comes twice: ``v e r v e r ...`` ends with the second ``v``."""
    text = words.written("v")
    assert text == "erv"
    assert (
        words.generate("--prompt", "v")[1]["text"] == words.ask("completions", prompt="v")[1]["text"] == text
    )
    assert words.lines[-1] == "generation_config.json: not applied: num_beams = 2"


def test_characters_of_several_tokens(words: _Chain) -> None:
    text = words.written("a")
    assert text == "🚗\u2028\t bSTOP do n't"
    shown, made = words.generate("--prompt", "a")
    assert text in shown  # also the tab, and the separator of lines
    assert made["text"] == text
    assert words.ask("completions", prompt="a")[1] == {"text": text}
    for stop, left in (
        ("\u2028", "🚗"),
        ("\t b", "🚗\u2028"),
        ("STOP", "🚗\u2028\t b"),
        ("n't", "🚗\u2028\t bSTOP do "),
    ):
        choice, streamed = words.ask("completions", prompt="a", stop=["no", stop])
        assert (choice["text"], choice["finish_reason"], streamed) == (left, "stop", {"text": left})


def test_a_stop_string_in_the_last_token(words: _Chain) -> None:
    """Bytes wait for what follows them; nothing does behind the last token."""
    choice, _ = words.ask("completions", prompt="a", stop="🚗", max_tokens=4)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    choice, _ = words.ask("completions", prompt="a", max_tokens=4)
    assert (choice["text"], choice["finish_reason"]) == ("🚗", "length")


def test_what_ends_a_text(words: _Chain) -> None:
    (end,) = words.tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    before = " France is Paris and London Hello world"
    _, made = words.generate("--prompt", "The capital of", "--stop", "<|im_end|>")
    assert (made["text"], made["ending"]) == (before, "stop")
    for fields, left in (
        ({"stop": "<|im_end|>"}, before),
        ({"stop": ["London<|tool|> Hello"]}, " France is Paris and "),
        ({"stop": " France"}, ""),
        ({"stop": "of France"}, before + "!"),  # it begins in the prompt, which is no text of the answer
        ({"stop_token_ids": [end]}, before),
        ({"stop_token_ids": words.tokenizer.convert_tokens_to_ids(["▁world", "▁is"])}, " France"),
        ({"stop_token_ids": []}, before + "!"),
    ):
        choice, streamed = words.ask("completions", prompt="The capital of", **fields)
        assert (choice["text"], choice["finish_reason"]) == (left, "stop")
        assert streamed["text"] == left
    message = [{"role": "user", "content": "The capital of"}]
    choice, streamed = words.ask("chat/completions", messages=message, stop_token_ids=[end], stop=["<|s|>"])
    assert choice["message"]["content"] == streamed["content"] == before.strip()


@pytest.mark.parametrize("value", [7, [1.0], [True], ["</s>"], [-1], [1, 1 << 70]])
def test_stop_tokens_that_are_none(words: _Chain, value: object) -> None:
    body = {"model": MODEL, "prompt": "a", "stop_token_ids": value}
    answer = words.client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stop_token_ids"


def test_channels_of_an_answer(channels: _Chain) -> None:
    shown, made = channels.generate("--prompt", "Hi", "--chat")
    assert "\nHello!\n" in shown
    assert "reets" not in shown
    assert (made["text"], made["reasoning"], made["ending"]) == ("Hello!", "rets", "end")
    shown, made = channels.generate("--prompt", "Hi", "--chat", "--stop", "s")
    assert "all of its tokens are reasoning" in shown
    assert (made["text"], made["reasoning"], made["ending"]) == ("", "ret", "stop")
    message = [{"role": "user", "content": "Hi"}]
    for stop, answer, reasoning in (
        ([], "Hello!", "rets"),
        (["!"], "Hello", "rets"),
        (["ts"], "", "re"),
        (["<|end|>"], "", "rets"),
        (["tsHello"], "Hello!", "rets"),
    ):
        choice, streamed = channels.ask("chat/completions", messages=message, stop=stop)
        assert choice["message"]["content"] == streamed["content"] == answer
        assert choice["message"]["reasoning_content"] == streamed["reasoning_content"] == reasoning
        assert choice["finish_reason"] == "stop"
    prompt = "<|start|>assistant<|channel|>analysis<|message|>g"
    choice, streamed = channels.ask("completions", prompt=prompt)
    assert choice["text"] == streamed["text"] == "Hello!"
