"""Limits, keys, clients that leave or hold on, and the end of a server, over the fake model."""

import asyncio
import fcntl
import io
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fake_model import expected
from fake_server import MODEL, Fake, serving
from fastapi.routing import APIRoute
from refusals import refuses

from tierstore.serve.api.app import Keys
from tierstore.serve.api.server import ServerLog, listen
from tierstore.serve.config import LimitsConfig

pytestmark = pytest.mark.usefixtures("forked_python")

PATIENCE_S = 60


def body(prompt: str = "Once", tokens: int = 400, **fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **fields}


@contextmanager
def streaming(fake: Fake, **fields: object) -> Iterator[Iterator[str]]:
    """A stream whose first text has come."""
    with httpx.stream("POST", f"{fake.url}/v1/completions", json=body(stream=True, **fields)) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


def asking(fake: Fake, **fields: object) -> threading.Thread:
    """A request under way in a thread."""
    url, options = f"{fake.url}/v1/completions", {"json": body(**fields), "timeout": PATIENCE_S}
    thread = threading.Thread(target=httpx.post, args=(url,), kwargs=options)
    thread.start()
    return thread


def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def error(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


def test_a_full_queue_is_refused_with_a_time_to_come_back() -> None:
    with serving(room=1, pass_s=0.02, limits=LimitsConfig(queue=1)) as fake, streaming(fake):
        waiting = asking(fake, tokens=1)
        until(lambda: len(fake.service.engine.queue) == 1, "a request waits")
        answer = httpx.post(f"{fake.url}/v1/completions", json=body())
        assert answer.status_code == 429
        assert "queue is full" in error(answer)
        # Some 400 steps of 20 ms are left: eight seconds, less what has passed.
        assert 1 <= int(answer.headers["retry-after"]) <= 600
        fake.service.engine.close()
        waiting.join()


def test_tokens_in_the_queue_are_limited() -> None:
    with serving(room=1, pass_s=0.02, limits=LimitsConfig(queue_tokens=100)) as fake, streaming(fake):
        ask = asking(fake, tokens=90)
        until(lambda: fake.service.engine.queue.tokens == 94, "a request waits")
        answer = httpx.post(f"{fake.url}/v1/completions", json=body(tokens=3))
        assert answer.status_code == 429
        assert "have 94 tokens; with 7 more" in error(answer)
        fake.service.engine.close()
        ask.join()


def test_a_client_that_leaves_frees_its_place() -> None:
    with serving(room=2, pass_s=0.01) as fake:
        with streaming(fake):
            assert fake.service.engine.active == 1
        until(lambda: fake.service.engine.active == 0, "the sequence has left")
        assert fake.runner.sequences == {}
        outcomes = httpx.get(f"{fake.url}/metrics").text
        assert 'tierstore_requests_total{outcome="cancelled"} 1.0' in outcomes


def test_a_request_that_takes_too_long_ends() -> None:
    with serving(pass_s=0.02, limits=LimitsConfig(request_s=0.2)) as fake:
        answer = httpx.post(f"{fake.url}/v1/completions", json=body())
        assert (answer.status_code, error(answer)) == (504, "the answer was not complete within 0.2 s")
        until(lambda: fake.service.engine.active == 0, "the sequence has left")
        with streaming(fake) as lines:
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "timeout_error"


def test_decoding_goes_on_between_prefills() -> None:
    """Prompts of 300 tokens come in one at a time (``prefill_tokens``), with a step of all others after each."""
    with serving(room=8, pass_s=0.01, limits=LimitsConfig(prefill_tokens=300)) as fake, streaming(fake):
        asks = [asking(fake, prompt="x" * 300, tokens=60) for _ in range(5)]
        for ask in asks:
            ask.join()
        done = [what for what, _ in fake.runner.passes]
        assert done.count("join") == 6
        assert not any(before == after == "join" for before, after in itertools.pairwise(done))


def test_bytes_that_are_no_request_end_the_connection() -> None:
    with serving() as fake:
        parts = urlsplit(fake.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S) as noise:
            noise.sendall(b"\x16\x03\x01\xff no HTTP\r\n\r\n")
            assert b"".join(iter(lambda: noise.recv(4096), b"")).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{fake.url}/health").status_code == 200


def test_slow_headers_and_slow_readers_are_cut_off() -> None:
    limits = LimitsConfig(receive_s=0.3, send_s=0.3)
    with serving(limits=limits, pass_s=0.001) as fake:
        parts = urlsplit(fake.url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\n")
            assert slow.recv(1) == b""
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PATIENCE_S) as half:
            half.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9\r\n\r\n{"
            )
            assert half.recv(100).startswith(b"HTTP/1.1 408 ")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            deaf.connect((parts.hostname or "", parts.port or 0))
            with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012
                while True:
                    deaf.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
                    time.sleep(0.01)
        until(lambda: not fake.server.server_state.connections, "all connections are closed")


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\nfirst-key-of-all-keys\nsecond-key-of-all-keys\n")
    Keys.read(path).check("Bearer second-key-of-all-keys")
    with serving(keys=("first-key-of-all-keys",)) as fake:
        routes = [route for route in fake.service.app().routes if isinstance(route, APIRoute)]
        assert {route.path for route in routes if not route.dependencies} == {"/", "/health"}
        for route in routes:
            for method in route.methods:
                given = httpx.request(method, fake.url + route.path_format.format(name=MODEL), json={})
                assert given.status_code == (401 if route.dependencies else 200), route.path
        wrong = httpx.get(f"{fake.url}/v1/models", headers={"Authorization": "Bearer first-key-of-all-keyz"})
        assert (wrong.status_code, error(wrong)) == (401, "unknown API key")
        assert wrong.headers["www-authenticate"] == "Bearer"
        right = httpx.get(f"{fake.url}/v1/models", headers={"Authorization": "Bearer first-key-of-all-keys"})
        assert right.status_code == 200


def test_a_port_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP  # or asyncio leaves Nagle's algorithm on
        port = bound.getsockname()[1]
        with refuses(OSError, "in use") as raised:
            listen("127.0.0.1", port)
        assert raised.value.filename == f"127.0.0.1:{port}"


@contextmanager
def program(pass_s: float, *limits: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The fake server as a process of its own."""
    command = [sys.executable, Path(__file__).with_name("fake_server.py"), "4", str(pass_s), *limits]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    environment.pop("PYTHONSAFEPATH", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_sigterm_finishes_what_is_under_way_and_refuses_the_rest() -> None:
    with program(0.02) as (process, url), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        text, finish, _ = expected("Once", 60)
        with client.stream("POST", "/v1/completions", json=body(tokens=60, stream=True)) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)
            until(lambda: client.get("/health").status_code == 503, "it drains")
            refused = client.post("/v1/completions", json=body())
            assert (refused.status_code, error(refused)) == (503, "the server is shutting down")
            events = [json.loads(line[6:]) for line in (first, *lines) if line and line != "data: [DONE]"]
        assert "".join(event["choices"][0]["text"] for event in events) == text
        assert events[-1]["choices"][0]["finish_reason"] == finish
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_the_end_of_draining_and_a_second_signal() -> None:
    with program(0.05, "drain_s=0.3") as (process, url):
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body(stream=True), timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert "the server was shut down before the answer was complete" in last
        assert process.wait(PATIENCE_S) == 0
    with (
        program(0.05) as (process, url),
        httpx.stream("POST", f"{url}/v1/completions", json=body(stream=True), timeout=PATIENCE_S) as answer,
    ):
        lines = answer.iter_lines()  # kept: where it goes, the client does
        next(lines)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)  # two of one number at the same time are one signal
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


async def test_a_log_that_nobody_reads_stops_neither_the_loop_nor_the_model() -> None:
    """A full pipe blocks who writes to it; lines keep their order, and the oldest give way."""
    reading, writing = os.pipe()
    filled = fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)
    os.write(writing, b"\n" * filled)
    log = ServerLog(writing)
    with open(reading, "rb", buffering=0) as reader:
        async with log.writing():
            log.write("first")
            await asyncio.sleep(0.05)  # its write is under way, and waits
            for number in range(2 * ServerLog.KEPT):
                await asyncio.to_thread(log.write, f"line {number}")
            begun = asyncio.get_running_loop().time()
            for _ in range(10):
                await asyncio.sleep(0.001)
            assert asyncio.get_running_loop().time() - begun < 1
            read = asyncio.create_task(asyncio.to_thread(_until, reader, b"line 1999\n"))
        lines = [line for line in (await read).splitlines() if line]
        log.write("after the loop")
        assert reader.read(100) == b"after the loop\n"
    os.close(writing)
    assert lines == [b"first", *(b"line %d" % number for number in range(ServerLog.KEPT, 2 * ServerLog.KEPT))]


def _until(reader: io.RawIOBase, end: bytes) -> bytes:
    found = b""
    while not found.endswith(end):
        found += reader.read(1 << 16) or b""
    return found
