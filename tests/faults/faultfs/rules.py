"""What goes wrong, and when."""

from __future__ import annotations

import errno
import fnmatch
import threading
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Action(Enum):
    FAIL = "fail"  # the operation returns ``errno``, and does nothing
    SHORT = "short"  # of a transfer, only the first ``nbytes`` are done
    DELAY = "delay"  # the operation is done ``seconds`` later
    FLIP = "flip"  # bit ``bit`` of what is read or written is turned
    LOSE = "lose"  # the operation is acknowledged, and not done
    VANISH = "vanish"  # the file system is gone, as if its drive had been pulled out


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One fault: operations ``op`` (read, write, fsync, fallocate, open, create, rename, ...) on files that match
    ``path`` (a pattern, from the mount on); of these ``after`` pass first, then ``times`` (-1: all) go wrong.

    ``at``: only transfers that touch this byte of the file. ``holding``: only writes that contain this text.
    """

    op: str
    action: Action
    path: str = "*"
    after: int = 0
    times: int = -1
    at: int | None = None
    holding: str = ""
    errno: int = errno.EIO
    nbytes: int = 0
    seconds: float = 0.0
    bit: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"action": self.action.value}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Rule:
        return cls(**(value | {"action": Action(value["action"])}))


class Rules:
    """The rules in force, and how often each went off. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._seen: list[int] = []
        self._fired: list[int] = []

    def add(self, rule: Rule) -> None:
        with self._lock:
            self._rules.append(rule)
            self._seen.append(0)
            self._fired.append(0)

    def clear(self) -> None:
        with self._lock:
            self._rules, self._seen, self._fired = [], [], []

    @property
    def fired(self) -> list[int]:
        with self._lock:
            return list(self._fired)

    def match(
        self, op: str, path: str, offset: int = 0, nbytes: int = 0, content: bytes = b""
    ) -> Rule | None:
        """The first rule that this operation sets off."""
        with self._lock:
            for number, rule in enumerate(self._rules):
                if rule.op != op or not fnmatch.fnmatch(path, rule.path):
                    continue
                if rule.at is not None and not offset <= rule.at < offset + nbytes:
                    continue
                if rule.holding.encode() not in content:
                    continue
                self._seen[number] += 1
                past = self._seen[number] - rule.after
                if past > 0 and (rule.times < 0 or past <= rule.times):
                    self._fired[number] += 1
                    return rule
        return None
