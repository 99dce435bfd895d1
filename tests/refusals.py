"""What is refused: the type of the error, and what its message names (keys, options, files, values), not its sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Refusal:
    """``act`` raises ``error``, whose text has each of ``named``."""

    name: str
    act: Callable[..., object]
    error: type[Exception]
    named: tuple[str, ...]


@contextmanager
def refuses(
    error: type[Exception] | tuple[type[Exception], ...], *named: object
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises ``error``, whose text has each of ``named``."""
    with pytest.raises(error) as caught:
        yield caught
    assert [part for part in map(str, named) if part not in str(caught.value)] == []
