"""Load on a running server: requests that come when they come (Poisson), and clients that misbehave.

    python tests/serve/serve_load.py URL [--minutes 30] [--share 0.8] [--malformed 2000] [--seed 0]

The answers of a set of prompts are asked for one by one first; under load they must be the same (start the server with
--batch-invariant). The server's capacity is measured with clients that saturate it; then ``share`` of it comes as open-loop
load, beside clients that leave in mid-stream, send garbage, hold connections open without sending or reading, and ask for
more than the limits. The last line is one JSON object; the exit status is 1 where a check failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx
from malformed import malformed

from tierstore.stats import percentile

_PROMPTS = 24
_LONGEST_S = 300.0
_SAMPLE_S = 5.0
_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
_GAUGES = (
    "resident_memory_bytes",
    "open_descriptors",
    "threads",
    "pinned_experts",
    "queue_requests",
    "batch_sequences",
)


@dataclass(frozen=True)
class Asked:
    """A request that a well-behaved client makes."""

    prompt: str
    max_tokens: int


@dataclass
class Seen:
    """What clients have seen."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: int = 0
    misbehaved: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


class Load:
    """Clients of one server."""

    def __init__(self, url: str, model: str, client: httpx.AsyncClient, seed: int) -> None:
        self.seen = Seen()
        self._url = url
        self._model = model
        self._client = client
        self._draw = random.Random(seed)
        self._expected: dict[Asked, str] = {}
        words = (
            "the",
            "of",
            "and",
            "tier",
            "expert",
            "store",
            "page",
            "slot",
            "layer",
            "token",
            "batch",
            "queue",
            "disk",
        )
        for number in range(_PROMPTS):
            prompt = " ".join(self._draw.choices(words, k=self._draw.randint(2, 24)))
            self._expected[Asked(f"{number} {prompt}", self._draw.choice((4, 8, 16, 32)))] = ""
        self._asked = list(self._expected)

    async def learn(self) -> None:
        """Each answer on its own."""
        for asked in self._asked:
            answer = await self._client.post("/v1/completions", json=self._body(asked))
            answer.raise_for_status()
            self._expected[asked] = answer.json()["choices"][0]["text"]

    async def capacity(self, *, clients: int, seconds: float) -> float:
        """Requests a second that ``clients`` get, each asking again when it is answered."""
        end, done = time.monotonic() + seconds, 0

        async def ask() -> None:
            nonlocal done
            while time.monotonic() < end:
                await self.well_behaved()
                done += 1

        begun = time.monotonic()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return done / (time.monotonic() - begun)

    async def open_loop(self, rate: float, seconds: float, misbehaving: float) -> int:
        """``rate`` requests a second, and ``misbehaving`` clients a second, each in turns of another kind."""
        kinds = [
            self._leave,
            self._garbage,
            self._never_send,
            self._never_read,
            self._too_much,
            self._half_a_body,
        ]
        async with asyncio.TaskGroup() as group:
            started = await asyncio.gather(
                self._arrive(group, rate, seconds, lambda number: self.well_behaved()),
                self._arrive(group, misbehaving, seconds, lambda number: kinds[number % len(kinds)]()),
                self._arrive(group, 1 / 60, seconds, lambda number: self._burst()),
            )
        return started[0]

    async def _arrive(
        self, group: asyncio.TaskGroup, rate: float, seconds: float, made: Callable[[int], Awaitable[None]]
    ) -> int:
        draw = random.Random(self._draw.random())
        at, end, number = time.monotonic(), time.monotonic() + seconds, 0
        while (at := at + draw.expovariate(rate)) < end:
            await asyncio.sleep(max(at - time.monotonic(), 0))
            group.create_task(_finished(made(number)))
            number += 1
        return number

    async def well_behaved(self) -> None:
        """Asks, again where it is refused for now, and compares."""
        asked = self._draw.choice(self._asked)
        stream = self._draw.random() < 0.7
        for _ in range(100):
            begun = time.monotonic()
            try:
                status, text, times = await (self._streamed(asked) if stream else self._whole(asked))
            except httpx.HTTPError as error:
                self.seen.wrong.append(f"{asked}: {error!r}")
                return
            if status not in (429, 503):  # 503: as many connections as there may be
                break
            self.seen.refused += 1
            await asyncio.sleep(float(text) * (1 + self._draw.random()))  # not all at once
        if status != 200 or text != self._expected[asked]:
            self.seen.wrong.append(f"{asked}: {status} {text!r} is not {self._expected[asked]!r}")
            return
        self.seen.right += 1
        self.seen.whole_s.append(time.monotonic() - begun)
        if times:
            self.seen.first_s.append(times[0] - begun)
            self.seen.between_s += [after - before for before, after in itertools.pairwise(times)]

    async def _whole(self, asked: Asked) -> tuple[int, str, list[float]]:
        answer = await self._client.post("/v1/completions", json=self._body(asked))
        if not answer.is_success:
            return answer.status_code, answer.headers.get("retry-after", "1"), []
        return answer.status_code, answer.json()["choices"][0]["text"], []

    async def _streamed(self, asked: Asked) -> tuple[int, str, list[float]]:
        texts, times = [], []
        async with self._client.stream(
            "POST", "/v1/completions", json=self._body(asked) | {"stream": True}
        ) as answer:
            if not answer.is_success:
                return answer.status_code, answer.headers.get("retry-after", "1"), []
            async for line in answer.aiter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    return 500, event["error"]["message"], []
                if event["choices"][0]["text"]:
                    texts.append(event["choices"][0]["text"])
                    times.append(time.monotonic())
        return answer.status_code, "".join(texts), times

    def _body(self, asked: Asked) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": asked.prompt,
            "max_tokens": asked.max_tokens,
            "temperature": 0,
        }

    async def _leave(self) -> None:
        """Leaves after the first event."""
        body = self._body(self._draw.choice(self._asked)) | {"max_tokens": 64, "stream": True}
        async with self._client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        self.seen.misbehaved["left in mid-stream"] += 1

    async def _garbage(self) -> None:
        """Bytes that are no HTTP, and then a request that is not one."""
        reader, writer = await self._connect()
        writer.write(self._draw.randbytes(200) + b"\r\n\r\n")
        await asyncio.wait_for(reader.read(), 30)
        await _closed(writer)
        (request,) = malformed(1, model=self._model, seed=self._draw.randrange(1 << 30))
        answer = await self._client.request(
            request.method, request.path, content=request.content, headers={"Content-Type": request.kind}
        )
        if answer.status_code not in (*request.statuses, 503):
            self.seen.wrong.append(f"{request}: {answer.status_code}")
        self.seen.misbehaved["sent garbage"] += 1

    async def _never_send(self) -> None:
        """A header, byte by byte, until it is cut off."""
        reader, writer = await self._connect()
        with contextlib.suppress(ConnectionError):
            for byte in b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: " + b"x" * 1000:
                writer.write(bytes([byte]))
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    if not await asyncio.wait_for(reader.read(1), 0.5):
                        break
            else:
                self.seen.wrong.append("a header that never ended was waited for")
        await _closed(writer)
        self.seen.misbehaved["sent a header byte by byte"] += 1

    async def _half_a_body(self) -> None:
        """Promises more than it sends."""
        reader, writer = await self._connect()
        writer.write(f"{_HEAD}Content-Length: 500\r\n\r\n{{".encode())
        answer = await asyncio.wait_for(reader.read(), 120)
        if b" 408 " not in answer[:20] and b" 503 " not in answer[:20]:
            self.seen.wrong.append(f"half a body was answered with {answer[:40]!r}")
        await _closed(writer)
        self.seen.misbehaved["sent half a body"] += 1

    async def _never_read(self) -> None:
        """Asks for answers and reads none of them."""
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.setblocking(False)
        parts = urlsplit(self._url)
        await asyncio.get_running_loop().sock_connect(raw, (parts.hostname, parts.port))
        body = json.dumps(self._body(self._asked[0]) | {"stream": True}).encode()
        head = f"{_HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
        with contextlib.suppress(OSError), raw:
            for _ in range(8):  # pipelined
                await asyncio.get_running_loop().sock_sendall(raw, head + body)
                await asyncio.sleep(4)
        self.seen.misbehaved["read nothing"] += 1

    async def _too_much(self) -> None:
        """Beyond the context, the largest body, and what a request may ask for."""
        asked = self._body(self._asked[0])
        for body, expected in (
            (asked | {"prompt": "word " * 50_000}, 400),
            (asked | {"prompt": "x" * (5 << 20)}, 413),
            (asked | {"max_tokens": 1 << 30}, 400),
            (asked | {"model": "none"}, 404),
        ):
            answer = await self._client.post("/v1/completions", json=body)
            if answer.status_code not in (expected, 503):
                self.seen.wrong.append(f"expected {expected}, got {answer.status_code} {answer.text[:200]}")
        self.seen.misbehaved["asked for too much"] += 1

    async def _burst(self) -> None:
        """More requests at once than may wait; those that are accepted are cancelled."""
        body = self._body(self._asked[0]) | {"max_tokens": 1}

        async def ask() -> int:
            answer = await self._client.post("/v1/completions", json=body)
            if answer.status_code == 429 and int(answer.headers["retry-after"]) < 1:
                self.seen.wrong.append("a refusal without a time to ask again")
            return answer.status_code

        statuses = Counter(await asyncio.gather(*(ask() for _ in range(96))))
        if set(statuses) - {200, 429, 503}:
            self.seen.wrong.append(f"a burst was answered with {statuses}")
        self.seen.misbehaved["burst: accepted"] += statuses[200]
        self.seen.misbehaved["burst: refused"] += statuses[429] + statuses[503]

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self._url)
        return await asyncio.open_connection(parts.hostname, parts.port)


async def _finished(work: Awaitable[None]) -> None:
    """``work``; a connection that the server closes is what some clients ask for."""
    with contextlib.suppress(httpx.HTTPError, OSError, TimeoutError):
        await work


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """What the server says of itself."""
    lines = (await client.get("/metrics")).text.splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    return {name: float(shown[f"tierstore_{name}"]) for name in _GAUGES}


async def idle(client: httpx.AsyncClient) -> dict[str, float]:
    """The same, when nothing is under way and closed connections are gone."""
    for _ in range(240):
        now = await gauges(client)
        if now["queue_requests"] == now["batch_sequences"] == 0:
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(8)
    return await gauges(client)


async def refuse(client: httpx.AsyncClient, model: str, count: int, seed: int) -> list[str]:
    """Sends malformed requests; returns what was not refused as it should be."""
    wrong = []
    for request in malformed(count, model=model, seed=seed):
        answer = await client.request(
            request.method, request.path, content=request.content, headers={"Content-Type": request.kind}
        )
        message = answer.json()["error"]["message"]
        if (
            answer.status_code not in request.statuses
            or not 5 < len(message) < 300
            or not message.isprintable()
        ):
            wrong.append(f"{request}: {answer.status_code} {message}")
    return wrong


async def run(
    url: str, *, seconds: float, share: float, count: int, seed: int, probe_s: float
) -> dict[str, object]:
    """The whole test: a report."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=_LONGEST_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        load = Load(url, model, client, seed)
        await load.learn()
        capacity = await load.capacity(clients=12, seconds=probe_s)
        await load.open_loop(share * capacity, probe_s, 1.0)  # memory has been through everything once
        before = await idle(client)
        warm, load.seen = load.seen, Seen()
        samples: list[dict[str, float]] = []

        async def watch() -> None:
            while True:
                with contextlib.suppress(httpx.HTTPError, KeyError):
                    samples.append(await gauges(client))
                await asyncio.sleep(_SAMPLE_S)

        watching = asyncio.create_task(watch())
        begun = time.monotonic()
        started = await load.open_loop(share * capacity, seconds, 0.5)
        elapsed = time.monotonic() - begun
        watching.cancel()
        malformed_wrong = await refuse(client, model, count, seed)
        after = await idle(client)
        health = (await client.get("/health")).status_code
    seen = load.seen
    memory = [one["resident_memory_bytes"] for one in samples]
    tenth = max(len(memory) // 10, 1)
    growth = statistics.median(memory[-tenth:]) - statistics.median(memory[:tenth]) if memory else 0.0
    checks = {
        "all answers right": not seen.wrong and not warm.wrong and seen.right == started,
        "malformed requests refused": not malformed_wrong,
        "memory": after["resident_memory_bytes"] - before["resident_memory_bytes"] <= 32 << 20,
        "descriptors": after["open_descriptors"] <= before["open_descriptors"] + 2,
        "threads": after["threads"] <= before["threads"] + 1,
        "leases": after["pinned_experts"] <= before["pinned_experts"],
        "idle again": after["queue_requests"] == after["batch_sequences"] == 0 and health == 200,
    }
    return {
        "checks": checks,
        "elapsed_s": elapsed,
        "capacity_per_s": capacity,
        "offered_per_s": share * capacity,
        "well_behaved": {"started": started, "right": seen.right, "retried_after_429": seen.refused},
        "wrong": (warm.wrong + seen.wrong + malformed_wrong)[:20],
        "misbehaved": dict(seen.misbehaved),
        "malformed": count,
        "first_token_s": _spread(seen.first_s),
        "between_tokens_s": _spread(seen.between_s),
        "answer_s": _spread(seen.whole_s),
        "before": before,
        "after": after,
        "memory_growth_under_load_bytes": growth,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99, 100)} if values else {}


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--share", type=float, default=0.8)
    parser.add_argument("--malformed", type=int, default=2000)
    parser.add_argument("--probe", type=float, default=30, help="seconds of measuring capacity")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    report = asyncio.run(
        run(
            given.url,
            seconds=given.minutes * 60,
            share=given.share,
            count=given.malformed,
            seed=given.seed,
            probe_s=given.probe,
        )
    )
    checks = report["checks"]
    assert isinstance(checks, dict)
    for name, held in checks.items():
        print(f"{'held' if held else 'FAILED'}: {name}")
    print(json.dumps(report))
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
