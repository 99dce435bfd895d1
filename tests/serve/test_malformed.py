"""Requests that cannot be served: each is answered with a 4xx and one sentence, and the server goes on."""

from __future__ import annotations

import httpx
import pytest
from fake_server import MODEL, serving
from malformed import malformed


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
