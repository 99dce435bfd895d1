"""What a run takes for a setting that may be AUTO, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decision(Generic[T]):
    """What a run takes for a setting that may be AUTO. ``value``: what ``name`` is, as configured or chosen; ``facts``: the
    figures that reports print beside it.
    """

    name: str
    value: T
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """One line."""
        value = self.value.value if isinstance(self.value, Enum) else self.value
        return f"{self.name}: {value} ({self.reason})"
