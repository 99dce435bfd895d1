"""The page in a real browser, where playwright and Chromium are installed.

Over the fake model what is shown is known: a chat's answer as it streams, tokens a second, the stop button, an error, the
mode without a chat; no error on the console, and no request to anywhere else.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_model import BROKEN_LATER, chat_text, expected
from fake_server import MODEL, serving

CHROMIUM = Path("/usr/bin/chromium")
PATIENCE_MS = 120_000


@pytest.fixture
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    if not CHROMIUM.exists():
        pytest.skip("apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield opened
        opened.close()


def open_page(browser: Any, url: str) -> tuple[Any, list[str]]:
    """The page, and what it complains of from then on."""
    page = browser.new_page(viewport={"width": 860, "height": 560})
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url) if not _own(request.url, url) else None)
    page.goto(url)
    return page, complaints


def _own(asked: str, url: str) -> bool:
    return asked.startswith((url, "data:"))


def ask(page: Any, text: str, **fields: str) -> str:
    """Sends ``text``, waits for the end, and returns the answer that is shown."""
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_selector("#send:not([disabled])")
    return str(page.locator(".turn.assistant").last.evaluate("turn => turn.textContent"))


def until(page: Any, condition: Callable[[], bool]) -> None:
    """Waits; the page's policy forbids what playwright would wait with."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < end, page.inner_text("body")
        page.wait_for_timeout(20)


def test_the_page_in_a_browser(browser: Any) -> None:
    with serving(pass_s=0.01) as fake:
        page, complaints = open_page(browser, fake.url)
        until(page, lambda: page.inner_text("#model") == MODEL)
        first = expected(chat_text([{"role": "user", "content": "Hello"}]), 40)[0]
        assert ask(page, "Hello", temperature="0", max_tokens="40") == first
        assert "40 tokens, " in page.inner_text("#status"), page.inner_text("#status")
        assert " tokens/s, first after " in page.inner_text("#status")
        history = [("user", "Hello"), ("assistant", first), ("user", "More")]
        prompt = chat_text([{"role": role, "content": content} for role, content in history])
        assert ask(page, "More") == expected(prompt, 40)[0]

        page.fill("#max_tokens", "300")
        page.fill("#prompt", "Stop me")
        page.click("#send")
        until(page, lambda: len(page.locator(".turn.assistant").nth(2).inner_text()) > 3)
        page.click("#stop")
        page.wait_for_selector("#send:not([disabled])")
        assert page.inner_text("#status").endswith(", stopped")
        until(page, lambda: fake.service.engine.active == 0)

        page.select_option("#mode", "text")
        assert ask(page, "Once", max_tokens="20") == "Once" + expected("Once", 20)[0]
        ask(page, f"a{BROKEN_LATER}b", max_tokens="20")
        assert "expert 5 is corrupt" in page.locator(".turn.error").last.inner_text()
        page.click("#clear")
        assert page.locator(".turn").count() == 0
        assert complaints == [], complaints
