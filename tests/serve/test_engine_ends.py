"""An engine that is left before its model is open, and requests that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fake_model
import pytest
from fake_model import FakeRunner
from fake_server import serving

from tierstore.serve.api.answering import Answering, EventStream
from tierstore.serve.api.metrics import ServerMetrics
from tierstore.serve.api.shapes import RequestKind, Shape
from tierstore.serve.config import LimitsConfig
from tierstore.serve.scheduler.engine import ServingEngine
from tierstore.serve.scheduler.interface import Running
from tierstore.serve.scheduler.queue import RequestQueue, Waiting
from tierstore.serve.scheduler.request import Answer, Generation
from tierstore.serve.text.language import ByteCodec
from tierstore.serve.text.sampling import SamplingOptions, TokenSampler
from tierstore.serve.text.streaming import StreamedText


def generation(tokens: int, prompt: bytes = b"word") -> Generation:
    return Generation(
        prompt=tuple(prompt),
        max_tokens=tokens,
        sampler=TokenSampler(SamplingOptions(temperature=0)),
        text=StreamedText(ByteCodec().pieces()),
    )


def test_an_interrupt_while_the_model_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends when the model is open: the process does not wait for it for ever."""
    opens, closed = threading.Event(), threading.Event()

    @contextmanager
    def opened() -> Iterator[Running]:
        assert opens.wait(60)
        with fake_model.opened(FakeRunner()) as running:
            yield running
        closed.set()

    engine = ServingEngine(opened, sequences=2, limits=LimitsConfig(), watcher=ServerMetrics())

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._ready, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), engine:
        raise AssertionError("it is not open")
    opens.set()
    assert closed.wait(60)


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
            waiting = engine.submit(generation(400))
            shape = Shape(style=RequestKind.CHAT, model="fake")
            stream = EventStream(Answering(engine, waiting, shape, request_s=60))
            await stream({}, receive, send)
            assert waiting.answer.cancelled

    asyncio.run(run())


def test_what_is_given_back_is_still_wanted() -> None:
    """By hand: two are taken, of which one is given up meanwhile; the other is first again."""

    async def run() -> None:
        queue = RequestQueue(LimitsConfig(), lambda: 1)
        both = [Waiting(generation(5), Answer(asyncio.get_running_loop())) for _ in range(2)]
        for one in both:
            queue.add(one)
        taken = queue.take(2)
        both[0].answer.cancelled = True
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
            queue.add(Waiting(generation(1, b"x" * length), Answer(asyncio.get_running_loop())))
        taken = [[len(one.generation.prompt) for one in queue.take(8)] for _ in range(3)]
        assert taken == [[2, 4, 4], [2], [9]]

    asyncio.run(run())
