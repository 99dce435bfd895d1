"""An engine that is left before its model is open, and requests that nobody waits for any more."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import fake_model
import httpx
import pytest
from fake_model import FakeRunner
from fake_server import prepared, serving
from refusals import refuses
from torch import Tensor

from tierstore.errors import PeerError, StoreError
from tierstore.serve.admission import AnswerError, GenerationRequest, RequestQueue
from tierstore.serve.api.answers import Answering, EventStream, RequestKind, Shape
from tierstore.serve.api.metrics import ServerMetrics
from tierstore.serve.config import LimitsConfig
from tierstore.serve.engine import Running, ServingEngine
from tierstore.serve.language import BytePieces, StreamedText
from tierstore.serve.sampling import SamplingOptions, TokenSampler


def request(tokens: int, prompt: bytes = b"word") -> GenerationRequest:
    return GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=tokens,
        sampler=TokenSampler(SamplingOptions(temperature=0)),
        text=StreamedText(BytePieces()),
    )


def test_an_interrupt_while_the_model_opens() -> None:
    """The thread ends when the model is open, and the process with it."""
    opens, closed = threading.Event(), threading.Event()

    @contextmanager
    def opened() -> Iterator[Running]:
        assert opens.wait(60)
        with fake_model.opened(FakeRunner()) as running:
            yield running
        closed.set()

    engine = ServingEngine(opened, sequences=2, limits=LimitsConfig(), metrics=ServerMetrics())
    threading.Timer(0.05, opens.set).start()
    with pytest.raises(KeyboardInterrupt), engine:
        raise KeyboardInterrupt
    assert closed.wait(60)
    assert not engine.alive


def test_a_server_answers_while_its_model_opens() -> None:
    """503 at once, with OpenAI's error where there is one; keys are asked for as ever; 200 when it is open."""
    opens = threading.Event()
    body = {"model": "fake", "prompt": "Once", "max_tokens": 4, "temperature": 0}
    with (
        serving(opens=lambda: opens.wait(60), keys=("a" * 16,)) as fake,
        httpx.Client(base_url=fake.url, timeout=60) as client,
    ):
        key = {"Authorization": "Bearer " + "a" * 16}
        assert client.get("/health").status_code == 503
        assert client.get("/health").json() == {"status": "the model is being opened"}
        assert client.get("/").status_code == 200
        assert "tierstore_queue_requests 0.0" in client.get("/metrics", headers=key).text
        for answer in (
            client.get("/v1/models", headers=key),
            client.get("/v1/models/fake", headers=key),
            client.post("/v1/completions", json=body, headers=key),
            client.post("/v1/chat/completions", content=b"no JSON", headers=key),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"] == {
                "message": "the model is being opened",
                "type": "server_error",
                "param": None,
                "code": None,
            }
        assert client.get("/v1/models").status_code == 401
        opens.set()
        while client.get("/health").status_code != 200:
            assert fake.service.engine.alive
        assert client.post("/v1/completions", json=body, headers=key).status_code == 200


def test_a_server_ends_where_its_model_cannot_be_opened() -> None:
    """What opening raised, and not a hang."""

    def opens() -> None:
        raise StoreError("the store is damaged")

    limits = LimitsConfig()
    with (
        refuses(StoreError, "the store is damaged"),
        prepared(room=2, pass_s=0, limits=limits, opens=opens) as fake,
    ):
        fake.run()


class LostRunner(FakeRunner):
    """Its third step, or its third call without sequences, finds that rank 1 has died."""

    left = 3

    def step(self, tokens: Mapping[int, int]) -> dict[int, Tensor]:
        self.idle()
        return super().step(tokens)

    def idle(self) -> None:
        self.left -= 1
        if not self.left:
            raise PeerError("all_gather", "its process ended", rank=1)


@pytest.mark.parametrize("busy", [True, False])
def test_an_engine_ends_with_a_rank(busy: bool) -> None:
    """The request fails, and is not computed again; without one the engine finds out by itself."""

    @contextmanager
    def opened() -> Iterator[Running]:
        with fake_model.opened(LostRunner()) as running:
            yield replace(running, idle_s=None if busy else 0.01)

    async def run() -> None:
        limits, metrics = LimitsConfig(), ServerMetrics()
        with (
            refuses(PeerError, "rank 1 failed"),
            ServingEngine(opened, sequences=2, limits=limits, metrics=metrics) as engine,
        ):
            if busy:
                asked = engine.submit(request(8))
                with refuses(AnswerError, "the server was shut down"):
                    while True:
                        await asked.take()
            while engine.alive:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_pass_that_is_split_up_is_counted_and_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Two prompts come together while the model opens, and one meets a corrupt record: the other has its answer."""

    async def run() -> tuple[str, str]:
        opens = threading.Event()
        with serving(opens=lambda: opens.wait(60)) as fake:
            engine = fake.service.engine
            good, broken = (engine.submit(request(4, prompt)) for prompt in (b"Once", b"a\x01"))
            opens.set()
            text = ""
            while (update := await good.take()).finish is None:
                text += update.text
            with refuses(AnswerError, "layer 1, expert 5"):
                await broken.take()
            return text + update.text, fake.service.metrics.text().decode()

    text, metrics = asyncio.run(run())
    assert text == fake_model.expected("Once", 4)[0]
    assert "tierstore_split_passes_total 1.0" in metrics
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("a prefill of 2 sequences failed; computing each alone: records-0.bin: the")


def test_a_client_that_leaves_before_its_first_event() -> None:
    """Its stream cannot be written to, then it leaves: nothing more is computed for it."""

    async def run() -> None:
        stopped = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await stopped.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            stopped.set()
            await asyncio.Event().wait()

        with serving(pass_s=0.01) as fake:
            engine = fake.service.engine
            waiting = engine.submit(request(400))
            shape = Shape(style=RequestKind.CHAT, model="fake")
            stream = EventStream(Answering(engine, waiting, shape, request_s=60))
            await stream({}, receive, send)
            assert waiting.cancelled

    asyncio.run(run())


def test_what_is_given_back_is_still_wanted() -> None:
    """By hand: two are taken, of which one is given up meanwhile; the other is first again."""

    async def run() -> None:
        queue = RequestQueue(LimitsConfig(), lambda: 1)
        both = [request(5) for _ in range(2)]
        for one in both:
            queue.add(one)
        taken = queue.take(2)
        both[0].cancelled = True
        queue.remove(both[0])
        queue.give_back(taken)
        assert (len(queue), queue.tokens) == (1, 9)
        assert queue.take(2) == [both[1]]

    asyncio.run(run())


def test_prompts_that_are_computed_together_count_as_padded() -> None:
    """By hand, at most 12 tokens: 2 and 4 are 8 padded, a third one of 4 makes 12; 2 and 9 would be 18."""

    async def run() -> None:
        queue = RequestQueue(LimitsConfig(prefill_tokens=12), lambda: 1)
        for length in (2, 4, 4, 2, 9):
            queue.add(request(1, b"x" * length))
        taken = [[len(one.prompt) for one in queue.take(8)] for _ in range(3)]
        assert taken == [[2, 4, 4], [2], [9]]

    asyncio.run(run())
