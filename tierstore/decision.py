"""What a run chooses for a setting that may be AUTO, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What a run chose for the setting ``name``, which may be AUTO. ``value``: as configured or chosen; ``facts``: figures
    that reports print beside it.
    """

    name: str
    value: T
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """The decision in one line."""
        value = self.value.value if isinstance(self.value, Enum) else self.value
        return f"{self.name}: {value} ({self.reason})"
