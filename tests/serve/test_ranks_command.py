"""``torchrun ... tierstore generate`` and ``serve``: two real ranks over one imported store."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from command_line import object_of
from forked_python import ForkServer
from served_stores import make_tiny_store
from test_serve_command import Serving, serving_process

PATIENCE_S = 120
PROMPTS = ("two experts", "in the store", "a")
OPTIONS = ("--host-budget", "256KiB", "--batch-invariant", "--set", "threads=1")
ASKED: dict[str, Any] = {"model": "tiny", "temperature": 0}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_store(tmp_path_factory.mktemp("stores") / "tiny")


def command(*arguments: str | Path) -> list[str]:
    """Of two ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [sys.executable, *launcher, "-m", "tierstore.cli.main", *map(str, arguments)]


def texts(store: Path, ranks: int) -> list[dict[str, object]]:
    """Of this process, or of two ranks."""
    given = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    asked = ["generate", store, *given, "--max-tokens", "8", "--temperature", "0", *OPTIONS]
    if ranks == 1:
        found = object_of(*asked)
    else:
        line = command(*asked, "--json")
        done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        (printed,) = done.stdout.splitlines()  # by one rank
        found = json.loads(printed)
    return [
        {name: value for name, value in text.items() if name != "first_token_s"} for text in found["texts"]
    ]


def served(store: Path) -> Serving:
    return serving_process(*command("serve", store, "--port", "0", "--json", *OPTIONS))


def rank_of(torchrun: subprocess.Popen[str], rank: int) -> int:
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    ranks = [pid for pid in children if "tierstore.cli.main" in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(ranks[rank])


def test_the_texts_of_one_process_and_a_drain(store: Path, fork_server: ForkServer) -> None:
    """A stream is cancelled, another goes on after the signal to rank 0, which ends both ranks."""
    expected = texts(store, 1)
    assert texts(store, 2) == expected
    with fork_server.forking(), served(store) as (process, client):
        for prompt, text in zip(PROMPTS, expected, strict=True):
            answer = client.completions.create(**ASKED, prompt=prompt, max_tokens=8)
            assert answer.choices[0].text == text["text"]
        left = client.completions.create(**ASKED, prompt=PROMPTS[0], max_tokens=400, stream=True)
        next(left)
        left.close()
        stream = client.completions.create(**ASKED, prompt=PROMPTS[0], max_tokens=8, stream=True)
        first = next(stream)
        os.kill(rank_of(process, 0), signal.SIGTERM)
        assert "".join(chunk.choices[0].text for chunk in (first, *stream)) == expected[0]["text"]
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
    totals = json.loads(out.splitlines()[-1])
    assert totals["length_requests_count"] == 4
    assert totals["cancelled_requests_count"] == 1


@pytest.mark.usefixtures("forked_python")
def test_a_killed_rank_ends_the_server(store: Path) -> None:
    """In the middle of an answer, which ends with an error."""
    with served(store) as (process, client):
        stream = client.completions.create(**ASKED, prompt=PROMPTS[0], max_tokens=400, stream=True)
        next(stream)
        begun_s = time.monotonic()
        os.kill(rank_of(process, 1), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the server was shut down"):
            list(stream)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - begun_s < 30
    assert process.returncode != 0
    (said,) = [line for line in err.splitlines() if line.startswith("tierstore: error")]
    assert "rank 1 failed: its process ended" in said
