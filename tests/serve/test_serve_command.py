"""``tierstore serve`` as users run it: real processes over a tiny imported store, asked by OpenAI's client."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from served_stores import make_tiny_store

from tierstore.cli.main import cli

pytestmark = pytest.mark.usefixtures("forked_python")

PATIENCE_S = 120
PROMPT, TOKENS = "two experts in the store", 24


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_store(tmp_path_factory.mktemp("stores") / "tiny")


@contextmanager
def served(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """The server on a port of its own, and a client of it."""
    command = [sys.executable, "-m", "tierstore.cli.main", "serve", str(store), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            line = next(line for line in process.stderr if line.startswith("serving "))
            url = f"{line.split()[-1]}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
                yield process, client
        finally:
            process.kill()


def contents(store: Path) -> dict[str, str]:
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in store.rglob("*")
        if path.is_file()
    }


@pytest.mark.slow
def test_a_server_from_start_to_end(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It answers as ``generate`` does, drains at SIGTERM, and leaves the store as it was."""
    before = contents(store)
    options = ["--max-tokens", str(TOKENS), "--temperature", "0", "--json", "--host-budget", "256KiB"]
    with pytest.raises(SystemExit):
        cli.main(["generate", str(store), "--prompt", PROMPT, *options])
    (text,) = json.loads(capsys.readouterr().out.splitlines()[-1])["texts"]

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


def failed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", *arguments])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_cannot_be_served_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = str(tmp_path / "nothing")
    assert f"tierstore: error: {nothing}: no store here" in failed(capsys, nothing, "--port", "0")
    assert "limits.queue: expected at least 1, got 0" in failed(capsys, nothing, "--max-queue", "0")
    assert "--port" in failed(capsys, nothing, "--port", "70000")
    keys = tmp_path / "keys"
    keys.write_text("short\n")
    assert f"{keys}:1: expected at least 16" in failed(capsys, nothing, "--api-keys", str(keys))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert 'pip install "tierstore[serve]"' in failed(capsys, nothing)
