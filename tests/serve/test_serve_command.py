"""``tierstore serve`` as users run it: real processes over a tiny imported store, asked by OpenAI's client."""

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import openai
import pytest
from command_line import object_of, refused
from served_stores import make_tiny_store

pytestmark = pytest.mark.usefixtures("forked_python")

PATIENCE_S = 120
Serving = AbstractContextManager[tuple[subprocess.Popen[str], openai.OpenAI]]
PROMPT, TOKENS = "two experts in the store", 24


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_store(tmp_path_factory.mktemp("stores") / "tiny")


@contextmanager
def serving_process(*command: object) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """A process that serves, and a client of it."""
    with subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = next(line for line in process.stderr if line.startswith("serving ")).split()[-1]
            with openai.OpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
            ) as client:
                yield process, client
        finally:
            process.kill()


def served(store: Path, *options: str) -> Serving:
    """The server on a port of its own."""
    return serving_process(sys.executable, "-m", "tierstore.cli.main", "serve", store, "--port", 0, *options)


def contents(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_a_server_from_start_to_end(store: Path) -> None:
    """It answers as ``generate`` does, drains at SIGTERM, and leaves the store as it was."""
    before = contents(store)
    options = ("--max-tokens", TOKENS, "--temperature", 0, "--host-budget", "256KiB")
    (text,) = object_of("generate", store, "--prompt", PROMPT, *options)["texts"]

    with served(store, "--host-budget", "256KiB", "--json", "--batch-invariant") as (process, client):
        assert [model.id for model in client.models.list()] == ["tiny"]
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        assert client.completions.create(**asked).choices[0].text == text["text"]
        stream = client.completions.create(**asked, stream=True)
        first = next(stream)
        process.send_signal(signal.SIGTERM)
        assert "".join(chunk.choices[0].text for chunk in (first, *stream)) == text["text"]
        assert process.wait(PATIENCE_S) == 0
        totals = json.loads(process.stdout.read().splitlines()[-1])
    ended = totals["stop_requests_count"] + totals["length_requests_count"]
    assert (ended, totals["failed_requests_count"]) == (2, 0)
    assert totals["generated_tokens_count"] >= 1
    assert contents(store) == before


def failed(*arguments: object) -> str:
    """The one line on stderr of a command that ends with status 2."""
    (line,) = refused("serve", *arguments).splitlines()
    return line


def test_what_cannot_be_served_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = tmp_path / "nothing"
    assert f"tierstore: error: {nothing}: no store here" in failed(nothing, "--port", "0")
    assert "limits.queue: expected at least 1, got 0" in failed(nothing, "--max-queue", "0")
    assert "--port" in failed(nothing, "--port", "70000")
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    assert f"{keys}:1: expected at least 16" in failed(nothing, "--api-keys", keys)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "tierstore[serve]"' in failed(nothing)
