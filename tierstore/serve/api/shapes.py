"""The objects that OpenAI's API answers with."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field
from enum import Enum

from tierstore.serve.scheduler.interface import Finish


class RequestKind(Enum):
    """Of which of the two requests an answer is."""

    COMPLETION = "cmpl"
    CHAT = "chatcmpl"


@dataclass(frozen=True, kw_only=True)
class TokenUsage:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int

    def body(self) -> dict[str, int]:
        """As OpenAI names them."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
        }


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The objects of one answer, which share an id and a time. ``usage``: whether its events say how many tokens it took."""

    style: RequestKind
    model: str
    usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(
        self, text: str, finish: Finish, usage: TokenUsage, *, reasoning: str = ""
    ) -> dict[str, object]:
        """The answer as one object. A chat has its reasoning, where there is any."""
        if self.style is RequestKind.CHAT:
            message = {"role": "assistant", "content": text, "refusal": None}
            thought = {"reasoning_content": reasoning} if reasoning else {}
            return self._object("chat.completion", [_choice(finish, message=message | thought)]) | {
                "usage": usage.body()
            }
        return self._object("text_completion", [_choice(finish, text=text)]) | {"usage": usage.body()}

    def opening(self) -> bytes | None:
        """The event before any text, where there is one."""
        if self.style is RequestKind.COMPLETION:
            return None
        return self._chunk([_choice(None, delta={"role": "assistant", "content": ""})])

    def added(self, text: str, reasoning: str = "") -> bytes:
        """The event of more text. A chat has its reasoning, too."""
        if self.style is RequestKind.CHAT:
            named = {"reasoning_content": reasoning, "content": text}
            return self._chunk([_choice(None, delta={name: value for name, value in named.items() if value})])
        return self._chunk([_choice(None, text=text)])

    def closing(self, finish: Finish, usage: TokenUsage) -> bytes:
        """The events after the text."""
        empty: dict[str, object] = {"delta": {}} if self.style is RequestKind.CHAT else {"text": ""}
        events = self._chunk([_choice(finish, **empty)])
        if self.usage:
            events += event(self._object(self._chunk_kind, []) | {"usage": usage.body()})
        return events + b"data: [DONE]\n\n"

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.style is RequestKind.CHAT else "text_completion"

    def _chunk(self, choices: list[dict[str, object]]) -> bytes:
        chunk = self._object(self._chunk_kind, choices)
        return event(chunk | {"usage": None} if self.usage else chunk)

    def _object(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": f"{self.style.value}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


def _choice(finish: Finish | None, **content: object) -> dict[str, object]:
    reason = None if finish is None else finish.value
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def event(body: dict[str, object]) -> bytes:
    """A server-sent event. JSON has no bare ends of lines, so that one line holds it."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


def model_body(name: str, created: int) -> dict[str, object]:
    """The served model, as /v1/models lists it."""
    return {"id": name, "object": "model", "created": created, "owned_by": "tierstore"}
